"""Build commands that put the start-up ``.pth`` file into wheels and editable installs.

Covers: the one line that makes every interpreter of an environment run
``xinference_xavier.host.bootstrap``. Does not cover: what the bootstrap does. Runs in the build
process of setuptools only and is not installed. Wired up by ``[options] cmdclass`` in setup.cfg.
"""

from __future__ import annotations

from pathlib import Path

from setuptools.command.build_py import build_py
from setuptools.command.editable_wheel import editable_wheel

#: Sorts after setuptools' own ``__editable__*.pth``, which makes the package importable.
PTH_NAME = "xinference_xavier.pth"

#: What every interpreter of the environment runs at its start. It waits for the import of
#: ``xinference`` and loads the package only then, so other programs pay for one small class and
#: read no file of ours. A half removed package must not break ``import xinference``.
STARTUP_SOURCE = """
class XinferenceXavierStarter:
    def find_spec(name, path=None, target=None):
        if name == "xinference":
            try:
                from xinference_xavier.host.bootstrap import install
                install()
            except Exception:
                pass
sys.xinference_xavier_starter = XinferenceXavierStarter
sys.meta_path.insert(0, XinferenceXavierStarter)
"""

#: ``site`` executes the lines of a ``.pth`` file that start with ``import``, and runs the file
#: twice in a virtual environment: the attribute of ``sys`` makes the second run nearly free.
PTH_LINE = (
    'import sys; hasattr(sys, "xinference_xavier_starter") or '
    f'exec({STARTUP_SOURCE!r}, {{"sys": sys}})\n'
)


def write_pth(directory: str) -> Path:
    """Write the ``.pth`` file into ``directory``, the root of a wheel, and return its path."""
    path = Path(directory, PTH_NAME)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(PTH_LINE, encoding="ascii")
    return path


class BuildPyWithHook(build_py):
    """``build_py`` that adds the ``.pth`` file to the root of the build tree."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:  # an editable install never copies the build tree
            write_pth(self.build_lib)

    def get_outputs(self, include_bytecode: bool = True) -> list[str]:
        outputs: list[str] = super().get_outputs(include_bytecode)
        if self.editable_mode:
            return outputs
        return [*outputs, str(Path(self.build_lib, PTH_NAME))]


class EditableWheelWithHook(editable_wheel):
    """``editable_wheel`` that adds the ``.pth`` file to the unpacked wheel.

    ``_install_namespaces`` is private, but it is the only step that is handed the unpacked wheel's
    folder. ``tests/unit/test_packaging.py`` builds an editable wheel and looks for the file.
    """

    def _install_namespaces(self, installation_dir: str, pth_prefix: str) -> None:
        super()._install_namespaces(installation_dir, pth_prefix)
        write_pth(installation_dir)
