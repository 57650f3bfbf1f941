"""vLLM under Xinference with the snapshot cache: engine classes and their registration.

Unpickling one of our models in a new model process imports this package first, and importing
Xinference's models builds its engine registry, whose hook imports ``classes``. Were that module
already half imported, the hook would find it empty. So the registry is built here, before any
module of this package exists; and when it is the registry that brings us here, or the module that
takes its hooks, it is left alone.
"""

import sys

if not {"xinference.model", "xinference.engine_hooks"} & sys.modules.keys():
    import xinference.model.llm  # noqa: F401
