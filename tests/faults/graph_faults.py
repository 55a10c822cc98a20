"""Every fault that is planted into an ONNX file."""

from __future__ import annotations

import block_faults  # noqa: F401 - importing a file of faults lists them.
import routing_faults  # noqa: F401
import weight_faults  # noqa: F401
from fault_table import GRAPH_FAULTS

__all__ = ["GRAPH_FAULTS"]
