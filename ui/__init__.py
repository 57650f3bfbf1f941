"""Panel and web UI parts; installed as ``xinference_xavier.ui``."""
