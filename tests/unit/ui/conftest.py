"""The panel on Xinference's real API object, one for a module of tests and its event loop."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
import pytest_asyncio

pytest.importorskip("xinference")
pytest.importorskip("gradio")

from panel_api import PanelApi, panel_api


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def secured_api(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[PanelApi]:
    with pytest.MonkeyPatch.context() as patch:
        async with panel_api(tmp_path_factory.mktemp("secured"), patch, auth=True) as made:
            yield made


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def unsecured_api(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[PanelApi]:
    with pytest.MonkeyPatch.context() as patch:
        async with panel_api(tmp_path_factory.mktemp("open"), patch, auth=False) as made:
            yield made


@pytest.fixture
def secured(secured_api: PanelApi) -> PanelApi:
    """With authentication: an admin, a reader, a user who may not list models, an API key."""
    secured_api.forget()
    return secured_api


@pytest.fixture
def open_api(unsecured_api: PanelApi) -> PanelApi:
    """Without authentication."""
    unsecured_api.forget()
    return unsecured_api
