"""Share one set of weights across equal layers, then unshare: the idea of the paper (section 2, Algorithms 1 and 2).

Works on any list of equal modules and knows nothing of BERT. The modules stay distinct objects; while they
share, they hold the *same* `nn.Parameter` objects, so optimizer, DDP and checkpoint see each weight once, and
module identity, hooks and compiled code survive both ways. Unsharing gives modules new Parameters.

Words used here: a *unit* is `unit_layers` consecutive layers whose weights differ among themselves (A of the
paper's A x B; 1 by default); a *group* is a contiguous run of units that share their weights, written as a
pair (first, stop) of unit numbers.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

Groups = tuple[tuple[int, int], ...]


class Slot(NamedTuple):
    """A place in a module that holds a Parameter."""

    module: nn.Module
    name: str

    @property
    def parameter(self) -> nn.Parameter:
        """The Parameter that is there now."""
        parameter = self.module._parameters[self.name]
        assert parameter is not None
        return parameter


def one_group(num_units: int) -> Groups:
    """All units share."""
    return ((0, num_units),)


def single_groups(num_units: int) -> Groups:
    """No unit shares."""
    return tuple((unit, unit + 1) for unit in range(num_units))


def phase_name(groups: Groups) -> str:
    """`shared` (one group of several units), `unshared` (every group holds one unit), else `partly-shared`."""
    if all(stop - first == 1 for first, stop in groups):
        return "unshared"
    return "shared" if len(groups) == 1 else "partly-shared"


class SharedLayers:
    """A list of equal layers, arranged in units, of which groups share their weights.

    Args:
        layers: modules of equal structure, in order; they must hold no buffers of their own state.
        unit_layers: layers in a unit; must divide the number of layers.

    Raises:
        ValueError: the structures of two layers differ (both are printed), or `unit_layers` does not divide.
    """

    def __init__(self, layers: Iterable[nn.Module], unit_layers: int = 1) -> None:
        layers = list(layers)
        if not layers or len(layers) % unit_layers:
            raise ValueError(f"unit_layers={unit_layers}: expected a divisor of the number of layers, {len(layers)}")
        _check_equal_structure(layers)
        self.unit_layers = unit_layers
        self.units = [layers[start : start + unit_layers] for start in range(0, len(layers), unit_layers)]
        self.groups: Groups = single_groups(len(self.units))

    @property
    def phase(self) -> str:
        """`shared`, `partly-shared` or `unshared`."""
        return phase_name(self.groups)

    def share(self, groups: Groups) -> None:
        """Let the units of each group hold the Parameters of the group's first unit, at their mean.

        The mean changes nothing when the units start equal, which is how a shared run starts; it matters when
        sharing starts from a model whose layers differ.
        """
        _check_groups(groups, len(self.units))
        for first, stop in groups:
            leaders = self.unit_slots(first)
            followers = [self.unit_slots(unit) for unit in range(first + 1, stop)]
            for leader, *others in zip(leaders, *followers, strict=True):
                _set_to_mean(leader.parameter, [slot.parameter for slot in others])
                for slot in others:
                    slot.module._parameters[slot.name] = leader.parameter
        self.groups = groups

    def unshare(
        self, groups: Groups | None = None, optimizer: torch.optim.Optimizer | None = None, state: str = "copy"
    ) -> dict[nn.Parameter, nn.Parameter]:
        """Split groups: the first unit of each old group keeps its Parameters, every new group gets copies.

        Call it between two updates, with gradients cleared, and rebuild what holds a list of parameters (DDP).
        Values do not change, so neither does the loss. Costs one copy of the weights and of their optimizer state.

        Args:
            groups: the new groups, a refinement of the present ones; None: every unit by itself.
            optimizer: gets the new Parameters, in the parameter group of the one they copy.
            state: `copy` gives them a copy of the optimizer state, as the literal algorithm, in which each layer
                has had its own all along; `reset` gives all units of a split group fresh state.

        Returns:
            For each new Parameter the one it was copied from.
        """
        groups = single_groups(len(self.units)) if groups is None else groups
        _check_groups(groups, len(self.units))
        origins: dict[nn.Parameter, nn.Parameter] = {}
        for first, stop in groups:
            old_first, old_stop = next(group for group in self.groups if group[0] <= first < group[1])
            if stop > old_stop:
                raise ValueError(f"groups {groups}: expected a refinement of {self.groups}")
            if first != old_first:
                self._give_copies(first, stop, origins)
        self.groups = groups
        if optimizer is not None:
            _add_to_optimizer(optimizer, origins, state)
        return origins

    def sample_parameters(self, num_groups: int) -> list[nn.Parameter]:
        """The Parameters of at most `num_groups` groups, evenly spaced, each once."""
        chosen = self.groups[:: -(-len(self.groups) // num_groups)]
        return list(dict.fromkeys(slot.parameter for first, _ in chosen for slot in self.unit_slots(first)))

    def copies(self) -> dict[nn.Parameter, int]:
        """For each Parameter of the layers, the number of units that hold it."""
        counts: dict[nn.Parameter, int] = {}
        for first, stop in self.groups:
            counts.update((slot.parameter, stop - first) for slot in self.unit_slots(first))
        return counts

    @torch.no_grad()
    def average_gradients(self) -> None:
        """Turn the summed gradient of each shared Parameter into the mean over its units (Algorithm 1).

        Autograd adds up what the units contribute; the paper's update is the mean. Call it once per update,
        after accumulation and all-reduce (and unscaling), before norm and clipping.
        """
        by_size: dict[int, list[Tensor]] = {}
        for parameter, size in self.copies().items():
            if size > 1 and parameter.grad is not None:
                by_size.setdefault(size, []).append(parameter.grad)
        for size, gradients in by_size.items():
            torch._foreach_div_(gradients, size)

    def unit_slots(self, unit: int) -> list[Slot]:
        """Every (module, parameter name) of a unit, in an order that is the same for all units."""
        return [
            Slot(module, name)
            for layer in self.units[unit]
            for module in layer.modules()
            for name, parameter in module._parameters.items()
            if parameter is not None
        ]

    def _give_copies(self, first: int, stop: int, origins: dict[nn.Parameter, nn.Parameter]) -> None:
        copies: dict[nn.Parameter, nn.Parameter] = {}
        for unit in range(first, stop):
            for slot in self.unit_slots(unit):
                original = slot.parameter
                if original not in copies:
                    copies[original] = nn.Parameter(original.detach().clone(), requires_grad=original.requires_grad)
                # Not setattr: compiled code guards on the attribute path, and hooks of the module stay.
                slot.module._parameters[slot.name] = copies[original]
        origins.update((new, old) for old, new in copies.items())


@torch.no_grad()
def _set_to_mean(leader: nn.Parameter, followers: list[nn.Parameter]) -> None:
    if all(torch.equal(leader, follower) for follower in followers):
        return  # also keeps equal values bit for bit: (x + x + x) / 3 need not be x
    values = [parameter.detach() for parameter in (leader, *followers)]
    leader.copy_(torch.stack(values).mean(0))


def _check_groups(groups: Groups, num_units: int) -> None:
    starts = [first for first, _ in groups] + [num_units]
    follows = all(first < stop == starts[index + 1] for index, (first, stop) in enumerate(groups))
    if not groups or starts[0] != 0 or not follows:
        raise ValueError(f"groups {groups}: expected contiguous pairs (first, stop) that cover units 0 to {num_units}")


def _check_equal_structure(layers: list[nn.Module]) -> None:
    def structure(layer: nn.Module) -> list[str]:
        modules = [f"{name or '.'}: {type(module).__name__}" for name, module in layer.named_modules()]
        parameters = [
            f"{name} {tuple(p.shape)} {p.dtype}" for name, p in layer.named_parameters(remove_duplicate=False)
        ]
        return modules + parameters

    expected = structure(layers[0])
    for number, layer in enumerate(layers[1:], start=1):
        if structure(layer) != expected:
            raise ValueError(
                f"layers 0 and {number} differ in structure and cannot share weights:\n"
                f"layer 0: {layers[0]}\nlayer {number}: {layer}"
            )


@torch.no_grad()
def _add_to_optimizer(optimizer: torch.optim.Optimizer, origins: dict[nn.Parameter, nn.Parameter], state: str) -> None:
    copies_of: dict[Tensor, list[nn.Parameter]] = {}
    for new, old in origins.items():
        copies_of.setdefault(old, []).append(new)
    for group in optimizer.param_groups:
        group["params"] = [p for old in group["params"] for p in (old, *copies_of.get(old, []))]
    for original, copies in copies_of.items():
        if state == "reset":
            optimizer.state.pop(original, None)
        elif original in optimizer.state:
            for new in copies:
                optimizer.state[new] = {key: _clone(value) for key, value in optimizer.state[original].items()}


def _clone(value: object) -> object:
    return value.detach().clone() if isinstance(value, Tensor) else copy.deepcopy(value)


def weighted_gradient_norm(parameters: Sequence[nn.Parameter], copies: dict[nn.Parameter, int]) -> Tensor:
    """Global gradient norm that counts a shared gradient once for each unit that holds it: Algorithm 1's own.

    In Algorithm 1 every layer has its own copy of the mean gradient, so a weight shared by n units enters the
    squared norm n times. Stays on the device.

    Args:
        parameters: every Parameter once; those without a gradient are passed over.
        copies: units that hold a Parameter; 1 where it is not listed.
    """
    with_gradient = [(p.grad, copies.get(p, 1)) for p in parameters if p.grad is not None]
    if not with_gradient:
        raise ValueError("no parameter has a gradient")
    norms = torch._foreach_norm([gradient for gradient, _ in with_gradient])
    # Python numbers go into the kernel's arguments; a tensor of counts would be a copy from the host each step.
    norms = torch._foreach_mul(norms, [math.sqrt(count) for _, count in with_gradient])
    norm: Tensor = torch.linalg.vector_norm(torch.stack(list(norms)))
    return norm
