"""Everything that can be plugged in, in one place, because whoever has read it can extend any of it.

An *architecture* turns a checkpoint into modules. A *pass* rewrites an ONNX graph. An *engine* builds and loads what a
target runs. A *runner* is a loaded engine. A *check* judges one aspect of a runner. Plug-ins are listed in literal
tables (`PASSES`, `ENGINES`, `CHECKS`); architectures, which live in other packages, in the entry-point group
`mod_export.architectures`. The contract suites in tests/ run over the tables, so an entry is tested once it is listed.
"""

from mod_export.protocols.engines import (
    BindableRunner,
    EngineBuilder,
    EngineJob,
    EngineProfiler,
    GraphPass,
    Runner,
)
from mod_export.protocols.models import (
    Architecture,
    GeneratingModel,
    GraphSource,
    LayerCost,
    LoadedModel,
    ReferenceTrace,
)

__all__ = [
    "Architecture",
    "BindableRunner",
    "EngineBuilder",
    "EngineJob",
    "EngineProfiler",
    "GeneratingModel",
    "GraphPass",
    "GraphSource",
    "LayerCost",
    "LoadedModel",
    "ReferenceTrace",
    "Runner",
]
