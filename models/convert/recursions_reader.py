"""Reader of Mixture-of-Recursions with expert choice (arXiv 2507.10524).

Facts are from raymin0223/mixture_of_recursions, `model/mor_model/expert_choice_router.py` and
`model/mor_model/modeling_llama.py`. Layer L of its list is a layer of Llama, or a recursion step: a list of layers
`block` under one router, `mor_router`. Its k tokens with the largest scores, of those that ran in the step before, run
all layers of the step at their original positions, and a * sigmoid(l) * result is added to them.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from mod_models.convert.foreign import Derived, ForeignModel, Place, constant, refuse
from mod_models.convert.hugging_face import CONFIG
from mod_models.convert.implementation_source import MODEL_LAYERS, Source, as_family, with_routers
from mod_models.declarations import LIMITS
from mod_models.spec import shown

LAYER = re.compile(r"model\.layers\.(\d{1,6})\.(block\.(\d{1,6})\.)?")
OWN = re.compile(r"model\.layers\.\d{1,6}\.(mor_router|mlp_router)\.")
ROUTERS: Mapping[str, Mapping[str, str]] = {
    "linear": {"projection": "router"}, "mlp": {"hidden": "router.0", "projection": "router.2"},
}  # fmt: skip
"""Kind of router -> our layer -> its layer here; none has a bias."""
FIELDS = ("auto_map", "custom_model", "kv_sharing", "mor_enabled", "num_recursions", "routing_strategy")
"""Fields of uploads beside those of Llama. The tensors show how many steps there are."""


@dataclass(frozen=True, slots=True)
class Steps:
    """The layers of a folder.

    Attributes:
        steps: numbers of its recursion steps in the list of layers.
        blocks: how many layers each of them has.
        plain: numbers of its other layers.
    """

    steps: tuple[int, ...]
    blocks: int
    plain: tuple[int, ...]

    @classmethod
    def of(cls, source: Source) -> Steps:
        """Reads them from the names of the tensors."""
        found = [match for name in source.tensors if (match := LAYER.match(name)) is not None]
        # Only one step has layers here if the file holds shared weights once, but each has a router.
        steps = {int(match[1]) for match in found if match.string.startswith("mor_router.", match.end())}
        blocks = {int(match[3]) for match in found if match[2]}
        plain = {int(match[1]) for match in found} - steps
        return cls(tuple(sorted(steps)), len(blocks), tuple(sorted(plain)))

    @property
    def n_layers(self) -> int:
        """Number of layers that a token can run."""
        return len(self.steps) * self.blocks + len(self.plain)

    @property
    def place_of(self) -> dict[int, tuple[int, int | None]]:
        """Our layer -> its number in the list, and its number in a step."""
        places: list[tuple[int, int | None]] = []
        for number in sorted((*self.steps, *self.plain)):
            inside = range(self.blocks) if number in self.steps else (None,)
            places += [(number, block) for block in inside]
        return dict(enumerate(places))

    @property
    def step_of_router(self) -> dict[int, int]:
        """Our layer with a router -> the step."""
        return {layer: number for layer, (number, block) in self.place_of.items() if block == 0}


def read_recursions(source: Source) -> ForeignModel:
    """Reads such a folder. Steps share weights: a file can hold them once, in any step."""
    layout = Steps.of(source)
    fields = _fields(source, layout)
    place_of, step_of = layout.place_of, layout.step_of_router
    before = {layer: f"{MODEL_LAYERS}{number}.mor_router." for layer, number in step_of.items()}
    first = next(iter(before.values()))
    kind = "linear" if f"{first}router.weight" in source.tensors else "mlp"

    def spelled(name: str) -> str:
        match = LAYER.match(name)
        if match is None or int(match[1]) not in place_of:
            return name
        (number, block), rest = place_of[int(match[1])], name[match.end() :]
        if block is None:
            return f"{MODEL_LAYERS}{number}.{rest}"
        names = [f"{MODEL_LAYERS}{step}.block.{block}.{rest}" for step in (number, *layout.steps)]
        return next((stored for stored in names if stored in source.tensors), names[0])

    def find(name: str, shape: tuple[int, ...]) -> Place | Derived:
        _, layer, _, part, ending = name.split(".")
        if ending == "bias":
            return constant(shape, 0.0)
        return Place(f"{before[int(layer)]}{ROUTERS[kind][part]}.{ending}", shape)

    n_steps = len(layout.steps)
    schedule = tuple((n_steps - number) / n_steps for number in range(n_steps))
    routing = {
        "layers": tuple(step_of),
        "blocks_per_router": layout.blocks,
        "candidates": "previous",
        "router": kind,
        "router_hidden": max(1, source.shape(f"{first}{ROUTERS['mlp']['hidden']}.weight")[0]),
        "router_activation": "gelu",
        "gate": "scaled_sigmoid",
        "gate_scale": 0.1,
        "combine": "double_residual",
        "capacity": schedule if source.capacity is None else source.capacity,
    }
    own = {name for name in source.tensors if OWN.match(name)}
    return with_routers(source, fields, routing, find, own, _notes(source, schedule, own), spelled)


def _fields(source: Source, layout: Steps) -> dict[str, object]:
    """Returns the fields of config.json as Llama has them."""
    fields = dict(source.fields(CONFIG))
    problems: list[str] = []
    sharing = fields.get("kv_sharing")
    if sharing and not (isinstance(sharing, Mapping) and sharing.get("enable") is False):
        problems.append(
            "kv_sharing: all steps read the keys and values of the first, and a spec describes steps with their own"
        )
    if layout.n_layers > LIMITS["n_layers"]:
        problems.append(
            f"num_hidden_layers: expected at most {LIMITS['n_layers']}, the tensors are of {layout.n_layers}"
        )
    elif fields.get("num_hidden_layers") != layout.n_layers:
        problems.append(
            f"num_hidden_layers: {shown(fields.get('num_hidden_layers'))}, and the tensors are of {layout.n_layers} "
            f"layers: {len(layout.steps)} steps of {layout.blocks}, and {len(layout.plain)} others"
        )
    fields |= as_family(fields, "llama", problems)
    refuse(source.path / CONFIG, problems)
    return {name: value for name, value in fields.items() if name not in FIELDS}


def _notes(source: Source, schedule: tuple[float, ...], own: set[str]) -> list[str]:
    notes = [
        "a gate of 0.1 sigmoid(l), routers without a temperature, and keys and values of each step's own are what its "
        "configurations set; what a model was trained with is not saved: change gate, gate_scale and combine if it was "
        "something else",
        "weights that steps share are stored once for each step",
    ]
    if source.capacity is None:
        shares = ", ".join(f"{share:.3g}" for share in schedule)
        notes.append(f"the capacities {shares} are what its code sets; those of training are not saved (--capacity)")
    if any(".mlp_router." in name for name in own):
        notes.append("mlp_router is left out: its code trains it, and never selects by it")
    return notes
