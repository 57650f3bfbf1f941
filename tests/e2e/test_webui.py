"""The switch in Xinference's own launch dialog, on the released web UI and a real server.

One server with authentication and one tab serve all tests; they run in the order of this file.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from launch_dialog import TIMEOUT_MS, LaunchDialog, WebUI
from playwright.sync_api import Browser, expect
from server import ENGINE, Xinference, wait_until

MODEL = "qwen2.5-instruct"
UID = "by-hand"
TITLE = "GPU-first KV cache (Xavier)"
BUDGETS = {"xavier_gpu_budget": "16MiB", "xavier_cpu_budget": "64MiB"}

expect.set_options(timeout=TIMEOUT_MS)


@pytest.fixture(scope="module")
def configured(secured_server: Xinference, tiny_model: Path) -> Xinference:
    """The server, with a launch of the tiny model in its history, which the dialog loads."""
    launch = {
        "model_name": MODEL,
        "model_type": "LLM",
        "model_uid": UID,
        "model_engine": "vLLM",
        "model_format": "pytorch",
        "model_size_in_billions": "0_5",
        "quantization": "none",
        "n_gpu": None,
        "replica": 1,
        "model_path": str(tiny_model),
        **ENGINE,
    }
    body = {"model_name": MODEL, "model_uid": UID, "data": launch, "ui_data": {}}
    secured_server.client.post("/v1/launch_history", json=body).raise_for_status()
    return secured_server


@pytest.fixture(scope="module")
def ui(chromium: Browser, configured: Xinference) -> Iterator[WebUI]:
    found = WebUI(chromium, configured)
    found.log_in()
    yield found
    assert found.errors == []


@pytest.fixture
def dialog(ui: WebUI) -> LaunchDialog:
    """The launch dialog, anew."""
    ui.speak("en")
    return ui.open_launch_dialog(MODEL)


def test_pages_carry_the_script_and_other_answers_do_not(configured: Xinference) -> None:
    with httpx.Client(base_url=configured.url, timeout=30) as browser:
        page = browser.get("/launch-model/llm")
        assert page.text.count("/xavier-ui/launch_switch.js") == 1
        assert int(page.headers["content-length"]) == len(page.content)
        known = {"if-none-match": page.headers["etag"]}
        assert browser.get("/launch-model/llm", headers=known).status_code == 304
        for path in ("/launch-model.txt", "/docs", "/openapi.json", "/metrics", "/status"):
            assert "launch_switch.js" not in browser.get(path).text, path
        assert browser.get("/xavier-ui/launch_switch.js").status_code == 200


def test_the_switch_is_there_for_vllm_only(dialog: LaunchDialog) -> None:
    expect(dialog.section).to_be_visible()
    expect(dialog.switch).to_have_accessible_name(TITLE)
    expect(dialog.switch).to_have_attribute("aria-checked", "false")
    expect(dialog.gpu_budget).to_be_hidden()
    dialog.switch.click()
    expect(dialog.gpu_budget).to_be_visible()
    assert dialog.rows()["enable_xavier_gpu"] == "true"
    # Rows that would make a launch by another engine fail go with it.
    dialog.choose_engine("Transformers")
    expect(dialog.section).to_be_hidden()
    assert "enable_xavier_gpu" not in dialog.rows()
    dialog.choose_engine("vLLM")
    expect(dialog.switch).to_have_attribute("aria-checked", "false")


@pytest.mark.slow
def test_other_kinds_of_models_have_no_switch(ui: WebUI) -> None:
    ui.page.goto(f"{ui.server.url}/launch-model/embedding")
    ui.page.get_by_role("button", name="Launch", exact=True).first.click()
    opened = LaunchDialog(ui.page)
    opened.form.wait_for()
    expect(opened.section).to_be_hidden()


@pytest.mark.slow
def test_it_is_worked_by_the_keyboard(dialog: LaunchDialog) -> None:
    dialog.switch.focus()
    dialog.page.keyboard.press("Space")
    expect(dialog.switch).to_have_attribute("aria-checked", "true")
    dialog.page.keyboard.press("Tab")
    expect(dialog.gpu_budget).to_be_focused()
    expect(dialog.gpu_budget).to_have_accessible_name("GPU budget")
    dialog.page.keyboard.type("1GiB")
    dialog.page.keyboard.press("Tab")
    expect(dialog.cpu_budget).to_be_focused()
    expect(dialog.cpu_budget).to_have_accessible_name("CPU budget")
    dialog.page.keyboard.press("Tab")
    expect(dialog.share).to_be_focused()
    assert dialog.rows()["xavier_gpu_budget"] == "1GiB"


def test_a_bad_budget_is_refused_as_by_the_api(ui: WebUI, dialog: LaunchDialog) -> None:
    launched = len(ui.sent_to("/v1/models"))
    dialog.switch.click()
    dialog.gpu_budget.fill("4 furlongs")
    expect(dialog.problem).to_contain_text("xavier_gpu_budget='4 furlongs'")
    expect(dialog.gpu_budget).to_have_attribute("aria-invalid", "true")
    asked = ui.sent_to("/v1/xavier/validate")[-1]
    by_api = ui.server.client.post("/v1/models", json=asked)
    assert by_api.status_code == 400
    assert by_api.json()["detail"] == dialog.problem.inner_text()
    dialog.deploy.click()
    expect(dialog.gpu_budget).to_be_focused()
    assert len(ui.sent_to("/v1/models")) == launched
    # Below one row of this very model, which the server reads from its folder.
    dialog.gpu_budget.fill("1KiB")
    expect(dialog.problem).to_contain_text("at least 65536")
    dialog.gpu_budget.fill("16MiB")
    expect(dialog.problem).to_be_empty()
    dialog.cpu_budget.fill("0")
    expect(dialog.warnings).to_contain_text("xavier_cpu_budget=0")
    assert dialog.gpu_budget.get_attribute("aria-invalid") == "false"


@pytest.mark.slow
def test_switching_off_leaves_the_rows_of_others(dialog: LaunchDialog) -> None:
    before = dialog.rows()
    dialog.switch.click()
    dialog.gpu_budget.fill("1GiB")
    dialog.share.select_option(label="The whole cluster")
    dialog.switch.click()
    expect(dialog.gpu_budget).to_be_hidden()
    assert dialog.rows() == before
    dialog.switch.click()
    expect(dialog.gpu_budget).to_have_value("1GiB")
    expect(dialog.share).to_have_value("cluster")


@pytest.mark.parametrize(
    ("lang", "title", "label"),
    [
        ("zh", "GPU 优先 KV 缓存（Xavier）", "GPU 预算"),
        ("zh-TW", "GPU 優先 KV 快取（Xavier）", "GPU 預算"),
        ("ja", TITLE, "GPU budget"),
    ],
)
@pytest.mark.slow
def test_it_speaks_the_languages_of_the_page(ui: WebUI, lang: str, title: str, label: str) -> None:
    ui.speak(lang)
    opened = ui.open_launch_dialog(MODEL)
    expect(opened.switch).to_have_accessible_name(title)
    opened.switch.click()
    expect(opened.gpu_budget).to_have_accessible_name(label)


@pytest.mark.slow
def test_a_dialog_with_other_parameters_is_given_up(ui: WebUI, dialog: LaunchDialog) -> None:
    ui.said.clear()
    # Before anything is launched: rows from the history would be drawn, under the name of today.
    # As if a newer dialog read its additional parameters under another name.
    dialog.form.evaluate(
        """form => {
            let fiber = form[Object.keys(form).find(key => key.startsWith("__reactFiber$"))];
            while (!fiber.memoizedProps?.form) fiber = fiber.return;
            const store = fiber.memoizedProps.form;
            const { getFieldValue, setFieldValue } = store;
            const name = path => path === "kwargs" ? "renamed" : path;
            store.getFieldValue = path => getFieldValue(name(path));
            store.setFieldValue = (path, value) => setFieldValue(name(path), value);
        }"""
    )
    dialog.switch.click()
    expect(dialog.section).to_have_count(0)
    assert len([line for line in ui.said if "additional parameters were not found" in line]) == 1


@pytest.mark.slow
def test_a_launch_carries_the_options_everywhere(ui: WebUI, dialog: LaunchDialog) -> None:
    dialog.switch.click()
    dialog.gpu_budget.fill(BUDGETS["xavier_gpu_budget"])
    dialog.cpu_budget.fill(BUDGETS["xavier_cpu_budget"])
    dialog.share.select_option(label="Nobody")
    dialog.autostart.click()
    dialog.deploy.click()
    ui.page.wait_for_url("**/running-model", timeout=300_000)

    options = {"enable_xavier_gpu": True, **BUDGETS, "xavier_share": "off"}
    sent = [
        *ui.sent_to("/v1/models")[-1:],
        *[body["data"] for body in ui.sent_to("/v1/launch_history")[-1:]],
        *[body["launch"] for body in ui.sent_to("/v1/autostart/models")[-1:]],
    ]
    assert len(sent) == 3
    for body in sent:
        assert {name: body.get(name) for name in options} == options
        assert body["max_model_len"] == ENGINE["max_model_len"]
        assert "kwargs" not in body

    def replica() -> Any:
        (found,) = ui.server.client.get("/v1/xavier").json()["models"] or [None]
        return found and found["model_uid"] == UID and found["replicas"][0]

    options_kept = wait_until(replica, 240, ui.server.tail)["options"]
    assert options_kept["xavier_gpu_budget"] == 16 * 1024**2
    assert options_kept["xavier_cpu_budget"] == 64 * 1024**2
    assert options_kept["xavier_share"] == "off"


@pytest.mark.slow
def test_a_running_model_leads_to_its_panel(ui: WebUI) -> None:
    ui.page.goto(f"{ui.server.url}/running-model")
    expect(ui.panel_link()).to_have_count(1)
    expect(ui.panel_link()).to_have_text("KV cache")
    assert ui.panel_link().get_attribute("href") == f"{ui.server.url}/xavier/?model={UID}"


@pytest.mark.slow
def test_the_history_sets_the_switch_again(ui: WebUI, dialog: LaunchDialog) -> None:
    expect(dialog.switch).to_have_attribute("aria-checked", "true")
    expect(dialog.gpu_budget).to_have_value(BUDGETS["xavier_gpu_budget"])
    expect(dialog.cpu_budget).to_have_value(BUDGETS["xavier_cpu_budget"])
    expect(dialog.share).to_have_value("off")
    expect(dialog.problem).to_be_empty()
    # Once each: what the form sends for autostart and history it reads in these rows.
    listed = [name for name in dialog.rows() if "xavier" in name]
    assert sorted(listed) == sorted(["enable_xavier_gpu", *BUDGETS, "xavier_share"])
    kept = [entry["data"] for entry in ui.server.client.get("/v1/launch_history").json()]
    assert [data["xavier_gpu_budget"] for data in kept] == [BUDGETS["xavier_gpu_budget"]]


def test_a_dialog_that_is_not_known_is_left_alone(ui: WebUI) -> None:
    ui.page.goto(f"{ui.server.url}/launch-model/llm")
    ui.page.get_by_role("button", name="Launch", exact=True).first.wait_for()
    ui.said.clear()
    markup = '<div role="dialog"><form><input name="engine" value="vLLM"></form></div>'
    for _ in range(2):
        ui.page.evaluate("html => document.body.insertAdjacentHTML('beforeend', html)", markup)
        ui.page.wait_for_timeout(500)
    said = [line for line in ui.said if "xinference-xavier" in line]
    assert len(said) == 1
    assert "Additional Parameters" in said[0]
    assert ui.page.locator(".xavier-launch").count() == 0
    left = ui.page.locator("body > [role=dialog]").evaluate_all("all => all.map(e => e.outerHTML)")
    assert left == [markup, markup]
