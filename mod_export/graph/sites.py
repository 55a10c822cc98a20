"""Routing sites of a captured program: where it selects tokens, which tokens it selects, and how a run can force them.

A model marks its selections (`mod_export.mark_selection`). In an exported program a marker is a node. All code that
reads or changes routing works on these nodes, in the same way for every model:

* `name_sites` names the markers that the model left unnamed;
* `routing_sites` lists the sites;
* `with_routed_outputs` erases the markers, keeps the selections, and adds an output `routed_<site>` for each site.
  ONNX, AOTInductor and TensorRT get this program;
* `run_sites` runs the program with its markers, reports what each site selected and by which scores, and can replace
  selections;
* `stops_at_linears` runs it too, and shows the rows that each weight is multiplied with.

Shape legend: B rows, S positions of a row, T tokens that a site can select from, K slots, N sites of one marker.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor, fx
from torch.export import ExportedProgram, ModuleCallEntry
from torch.export.graph_signature import ExportGraphSignature, InputKind, OutputKind, OutputSpec, TensorArgument
from torch.utils import _pytree as pytree

from mod_export.graph.program_nodes import add_node, module_path
from mod_export.marker import MARKER, REORDERED
from mod_export.types import FOUND, Site, site_from_text

EMPTY = -1
RANK = "rank"


@dataclass(frozen=True, slots=True)
class RoutingSite:
    """A routing site: its name, its number of slots, and its rule (`rank`, `first_come`, or one of FOUND)."""

    name: Site
    k: int
    rule: str


class Selection(NamedTuple):
    """The selection of one site, as positions in the whole row.

    Attributes:
        index_BK: int64 (B, K), ascending positions, then empty slots. An empty slot holds -1, or a padding position if
            a whole block (a site whose name is a number) takes the top k of a whole row. A site with a rule of FOUND
            keeps the order of the program.
        live_BK: bool (B, K), False in empty slots.
        score_BS: (B, S), the scores that decided; -inf for tokens that the site could not see.
        open_BS: bool (B, S), the tokens that could be selected.
        rule: `rank`, `first_come`, or one of FOUND.
    """

    index_BK: Tensor
    live_BK: Tensor
    score_BS: Tensor
    open_BS: Tensor
    rule: str


class Marked(NamedTuple):
    """The arguments of a marker (see `mark_selection`): tensors in a run, nodes in a graph."""

    index: Any
    live: Any
    scores: Any
    available: Any
    positions: Any
    names: str
    rule: str

    @property
    def sites(self) -> list[Site]:
        """The names of the N sites that it marks."""
        return [site_from_text(name) for name in self.names.split(",")]

    @property
    def shows_padding(self) -> bool:
        """Whether empty slots may hold padding positions instead of -1. The most common site, a whole block that takes
        the top k of a whole row, needs no extra operation then, because it ranks padding last.
        """
        return self.rule in FOUND or (self.rule == RANK and self.positions is None and isinstance(self.sites[0], int))


def _markers(program: Runnable) -> list[tuple[fx.Node, Marked]]:
    nodes = program.graph_module.graph.nodes
    return [(node, Marked(*node.args)) for node in nodes if node.op == "call_function" and node.target is MARKER]


def name_sites(program: ExportedProgram) -> None:
    """Names each unnamed marker after the module that calls it: `layers.3`; `layers.3.0` if a module marks several."""
    unnamed: defaultdict[str, list[tuple[fx.Node, int]]] = defaultdict(list)
    for node, marked in _markers(program):
        if not marked.names:
            index = marked.index.meta["val"]
            unnamed[module_path(node)].append((node, index.shape[1] if index.dim() > 2 else 1))
    for path, markers in unnamed.items():
        total = sum(count for _, count in markers)
        names = iter([path] if total == 1 else [f"{path}.{number}" for number in range(total)])
        for node, count in markers:
            node.update_arg(Marked._fields.index("names"), ",".join(islice(names, count)))
    program.graph_module.recompile()


def routing_sites(program: Runnable) -> list[RoutingSite]:
    """The sites of a captured program, in the order in which it selects."""
    return [
        RoutingSite(site, marked.index.meta["val"].shape[-1], marked.rule)
        for _, marked in _markers(program)
        for site in marked.sites
    ]


def selected_from(program: ExportedProgram) -> list[int]:
    """T of each marker of a captured program: the number of tokens of a row that it selects from."""
    return [marked.scores.meta["val"].shape[-1] for _, marked in _markers(program)]


def with_routed_outputs(program: ExportedProgram) -> ExportedProgram:
    """Returns a copy without markers whose last outputs are the `Selection.index_BK` of each site, int64 (B, K)."""
    module = copy.deepcopy(program.graph_module)
    graph = module.graph
    routed: list[fx.Node] = []
    for node in [node for node in graph.nodes if node.op == "call_function" and node.target is MARKER]:
        marked = Marked(*node.args)
        with graph.inserting_before(node):
            routed += [_routed_node(graph, node, marked, n) for n in range(len(marked.sites))]
        for use in list(node.users):
            use.replace_all_uses_with(marked.index if use.args[1] == 0 else marked.live)
            graph.erase_node(use)
        graph.erase_node(node)
    for node in [node for node in graph.nodes if node.op == "call_function" and node.target is REORDERED]:
        # Engines never replace a selection, so the order stays as the sort gave it.
        node.replace_all_uses_with(node.args[0])
        graph.erase_node(node)
    output = graph.output_node()
    outputs = (*output.args[0], *routed)
    output.args = (outputs,)
    graph.eliminate_dead_code()
    module.recompile()
    return with_graph(program, module)


def _routed_node(graph: fx.Graph, marker: fx.Node, marked: Marked, n: int) -> fx.Node:
    def call(target: Any, *args: Any) -> fx.Node:
        return add_node(graph, marker, target, *args)

    aten = torch.ops.aten
    several = marked.index.meta["val"].dim() > 2
    index = call(aten.select.int, marked.index, 1, n) if several else marked.index
    if marked.positions is not None:
        index = call(aten.gather.default, marked.positions, 1, index)
    if marked.shows_padding:
        return index
    live = call(aten.select.int, marked.live, 1, n) if several else marked.live
    return call(aten.where.ScalarOther, live, index, EMPTY)


def with_graph(
    program: ExportedProgram, module: fx.GraphModule, state: Mapping[str, Tensor] | None = None
) -> ExportedProgram:
    """Returns the program with the graph of `module`, which has the same inputs and may have more outputs. The program
    keeps its weights unless `state` is given.
    """
    outputs: Sequence[fx.Node] = module.graph.output_node().args[0]  # type: ignore[assignment]  # As export leaves it.
    signature = program.graph_signature
    own_count = len(signature.output_specs)
    specs = [
        replace(spec, arg=TensorArgument(name=node.name))
        for spec, node in zip(signature.output_specs, outputs, strict=False)
    ]
    specs += [OutputSpec(OutputKind.USER_OUTPUT, TensorArgument(name=node.name), None) for node in outputs[own_count:]]
    root, *inner = program.module_call_graph
    assert root.signature is not None
    # The names are empty, because decomposing the program renames nodes and would look for the old names.
    call = replace(
        root.signature,
        outputs=[TensorArgument(name="") for _ in outputs],
        out_spec=pytree.tree_structure((0,) * len(outputs)),
    )
    return ExportedProgram(
        root=module,
        graph=module.graph,
        graph_signature=ExportGraphSignature(input_specs=list(signature.input_specs), output_specs=specs),
        state_dict=dict(program.state_dict if state is None else state),
        range_constraints=program.range_constraints,
        module_call_graph=[ModuleCallEntry(fqn=root.fqn, signature=call), *inner],
        example_inputs=program.example_inputs,
        constants=program.constants,
        verifiers=program.verifiers,
    )


class SiteRun:
    """Observes the markers of one run, and replaces the selections of the sites in `forced`.

    Attributes:
        selections: site -> Selection, in the order in which the program selects.
    """

    def __init__(self, seq: int, forced: Mapping[Site, Tensor] | None = None) -> None:
        """Prepares a run on rows of `seq` positions.

        Args:
            seq: S.
            forced: site -> int64 (B, K), positions in the row; negative in slots that stay empty.
        """
        self._seq, self._forced = seq, dict(forced or {})
        self.selections: dict[Site, Selection] = {}

    def mark(self, *args: Any) -> tuple[Tensor, Tensor]:
        """Returns the `index` and `live` that a marker with these arguments returns in this run.

        A forced selection leaves out positions that the site cannot select, because they are padding or were skipped
        earlier; in a found site, another token takes their slots. To notice this, compare `selections` with `forced`.
        """
        marked = Marked(*args)
        if marked.index.dim() == 2:
            return self._mark(marked.sites[0], marked)
        results = [
            self._mark(site, marked._replace(index=index, live=live, scores=scores))
            for site, index, live, scores in zip(
                marked.sites, marked.index.unbind(1), marked.live.unbind(1), marked.scores.unbind(1), strict=True
            )
        ]
        return torch.stack([index for index, _ in results], 1), torch.stack([live for _, live in results], 1)

    def _mark(self, site: Site, marked: Marked) -> tuple[Tensor, Tensor]:
        forced_BK = self._forced.get(site)
        if forced_BK is not None:
            index, live = self._forced_selection(marked, forced_BK)
            marked = marked._replace(index=index, live=live)
        index_BK, positions_BT = marked.index, marked.positions
        if positions_BT is None:
            # A found site may select from more tokens than the bucket has: from patches, or from all rows at once.
            self._seq = max(self._seq, marked.scores.shape[1])
        position_BK = index_BK if positions_BT is None else torch.gather(positions_BT, 1, index_BK)
        self.selections[site] = Selection(
            position_BK if marked.shows_padding else torch.where(marked.live, position_BK, EMPTY),
            marked.live,
            self._of_row(marked.scores, positions_BT, float("-inf")),
            self._of_row(marked.available, positions_BT, False),
            marked.rule,
        )
        # The marker returns copies too. The program may write to them, and the reported selection must not change.
        return marked.index.clone(), marked.live.clone()

    def _forced_selection(self, marked: Marked, forced_BK: Tensor) -> tuple[Tensor, Tensor]:
        """Converts forced positions to (index_BK, live_BK) among the T tokens, ascending unless the site was found."""
        if marked.rule in FOUND:
            # An index that names no token was reported before; here it must not stop the run.
            if marked.positions is None:
                return forced_BK.clamp(0, marked.scores.shape[1] - 1), marked.live
            token_BT = torch.arange(marked.positions.shape[1]).expand_as(marked.positions)
            token_BS = torch.zeros(len(forced_BK), self._seq, dtype=torch.int64).scatter(1, marked.positions, token_BT)
            return token_BS.gather(1, forced_BK.clamp(0, self._seq - 1)), marked.live
        wanted_BS = torch.zeros(len(forced_BK), self._seq + 1, dtype=torch.bool)
        # An extra last column takes the negative positions.
        wanted_BS = wanted_BS.scatter(1, torch.where(forced_BK < 0, self._seq, forced_BK), True)[:, :-1]
        wanted_BT = wanted_BS if marked.positions is None else torch.gather(wanted_BS, 1, marked.positions)
        wanted_BT = wanted_BT & marked.available
        index_BT = torch.sort(wanted_BT.to(torch.uint8), dim=1, descending=True, stable=True).indices
        index_BK = index_BT[:, : forced_BK.shape[1]]
        return index_BK, torch.gather(wanted_BT, 1, index_BK)

    def _of_row(self, value_BT: Tensor, positions_BT: Tensor | None, absent: float | bool) -> Tensor:
        """Spreads one value per token (T) over the S positions of the row; the other positions get `absent`."""
        if positions_BT is None:
            return value_BT
        value_BS = torch.full((len(value_BT), self._seq), absent, dtype=value_BT.dtype)
        return value_BS.scatter(1, positions_BT, value_BT)


class _AtUse(NamedTuple):
    """A weight that is converted at each use, so that memory never holds all weights in another form."""

    name: str
    tensor: Tensor


Convert = Callable[[str, Tensor], Tensor]
"""Returns the value of a weight, given its name and tensor, with which operations compute in a run."""


class Around(Protocol):
    """A function that is called in place of every operation of a run."""

    def __call__(self, node: fx.Node, compute: Callable[[], Any]) -> Any:
        """Returns the result that the operation has in this run; `compute` runs the operation itself."""


class _Interpreter(fx.Interpreter):
    def __init__(self, module: fx.GraphModule, run: SiteRun, convert: Convert | None, around: Around | None) -> None:
        super().__init__(module)
        self._run, self._convert, self._around = run, convert, around

    def run_node(self, n: fx.Node) -> Any:
        if self._around is not None:
            return self._around(n, lambda: super(_Interpreter, self).run_node(n))
        return super().run_node(n)

    def map_nodes_to_values(self, args: Any, n: fx.Node) -> Any:
        def value_of(node: fx.Node) -> Any:
            value = self.env[node]
            if self._convert is not None and isinstance(value, _AtUse):
                return self._convert(value.name, value.tensor)
            return value

        return fx.map_arg(args, value_of)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        return self._run.mark(*args) if target is MARKER else super().call_function(target, args, kwargs)


class Runnable(Protocol):
    """The parts of a captured program that a run needs."""

    @property
    def graph_module(self) -> fx.GraphModule: ...
    @property
    def graph_signature(self) -> ExportGraphSignature: ...
    @property
    def constants(self) -> Mapping[str, Any]: ...


def run_sites(
    program: Runnable,
    state: Mapping[str, Tensor],
    inputs: Sequence[Tensor],
    run: SiteRun,
    *,
    convert: Convert | None = None,
    around: Around | None = None,
) -> tuple[Tensor, ...]:
    """Runs a captured program with its markers, on the CPU.

    Args:
        program: captured on the CPU.
        state: name -> parameter or buffer: the captured ones, or others of the same shapes and dtypes.
        inputs: the inputs of the program.
        run: observes and replaces selections.
        convert: called at each use of floats in `state` and of float constants.
        around: called in place of every operation.

    Returns:
        The program's own outputs.
    """
    interpreter = _Interpreter(program.graph_module, run, convert, around)
    lifted = _lifted(program, state, inputs, at_use=convert is not None)
    with torch.no_grad():
        outputs: tuple[Tensor, ...] = interpreter.run(*lifted, enable_io_processing=False)
    return outputs


def _lifted(program: Runnable, state: Mapping[str, Tensor], inputs: Sequence[Tensor], *, at_use: bool) -> list[Any]:
    """Returns the values of the program's placeholders; with `at_use`, floats will be converted at each use."""
    user_inputs = iter(inputs)

    def lifted_of(name: str) -> Any:
        value = state.get(name, program.constants.get(name))
        return _AtUse(name, value) if at_use and isinstance(value, Tensor) and value.is_floating_point() else value

    specs = program.graph_signature.input_specs
    return [next(user_inputs) if spec.kind is InputKind.USER_INPUT else lifted_of(str(spec.target)) for spec in specs]


def linears_of(program: Runnable) -> dict[fx.Node, str]:
    """Maps each `linear` with a weight (N, K) to the name of the weight, in the order of the program."""
    specs = program.graph_signature.input_specs
    weights = {spec.arg.name: str(spec.target) for spec in specs if spec.kind is InputKind.PARAMETER}
    linears = {}
    for node in program.graph_module.graph.nodes:
        if node.target is torch.ops.aten.linear.default:
            x, weight = node.args[:2]
            if isinstance(x, fx.Node) and isinstance(weight, fx.Node) and weight.name in weights:
                linears[node] = weights[weight.name]
    return linears


def stops_at_linears(
    program: Runnable,
    state: Mapping[str, Tensor],
    inputs: Sequence[Tensor],
    run: SiteRun,
    *,
    convert: Convert | None = None,
) -> Iterator[tuple[str, Tensor]]:
    """Runs a captured program like `run_sites`, and stops before each of `linears_of`: yields the name of its weight,
    and the rows (..., K) that the weight will be multiplied with.

    Runs of the same program on several inputs stop at the same places, so they can be advanced together.
    """
    interpreter, linears = _Interpreter(program.graph_module, run, convert, None), linears_of(program)
    interpreter.args_iter = iter(_lifted(program, state, inputs, at_use=convert is not None))
    for node in program.graph_module.graph.nodes:
        if node in linears:
            yield linears[node], interpreter.env[node.args[0]]
        if node.op == "output":
            return
        # Not around the loop: it would hold for the caller too while this generator is suspended.
        with torch.no_grad():
            interpreter.env[node] = interpreter.run_node(node)
        for unused in interpreter.user_to_last_uses.get(node, ()):
            del interpreter.env[unused]
