"""What shows a replica that a caller belongs to its namespace and cluster."""

from __future__ import annotations

import hmac


def share_token(secret: bytes, scope: str) -> str:
    """HMAC-SHA256 of the scope's name under the cluster's secret, as hex."""
    return hmac.digest(secret, b"share " + scope.encode(), "sha256").hex()
