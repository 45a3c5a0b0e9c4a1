"""New picture encoders that see from the first update on.

What all pictures share (a black ground, a table) drowns what tells them apart in a random encoder,
and few demonstrations never teach it to see.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from policies.lerobot.noise import inputs_of


class Eye(NamedTuple):
    """A ``layer`` of an encoder that all of a picture goes through: the convolution that reads its
    pixels, or a linear one further on; and what is added to what it makes of each of ``places``
    [p d], where something is."""

    layer: Any
    places: Tensor | None = None


@torch.no_grad()
def centre(eyes: Iterable[Eye], look: Callable[[], Any]) -> None:
    """Of what each eye makes of the pictures that ``look`` shows to it, the mean is taken off (at
    each place, where it has places), and what is left gets unit variance; so does what tells
    places apart. Where nothing is added, it grows blind to the mean picture instead. Weights keep
    their names and shapes."""
    for layer, places in eyes:
        with inputs_of(layer) as seen:
            look()
        _centre(layer, places, torch.cat(seen))


def _centre(layer: Any, places: Tensor | None, shown: Tensor) -> None:
    patches = layer(shown)
    if patches.dim() > 3:  # of a convolution
        patches = patches.flatten(2).transpose(1, 2)
    if places is not None and len(places) != patches.shape[1]:  # pictures of another size
        places = None
    mean = patches.flatten(0, -2).mean(0) if places is None else patches.mean(0)
    spread = (patches - mean).square().mean().sqrt()
    if not spread > 0:
        return
    layer.weight.div_(spread)
    if layer.bias is not None:
        layer.bias.div_(spread)
    if places is not None:
        if not places.any():
            places.normal_()
        places.div_(places.std()).sub_(mean / spread)
    elif layer.bias is not None:
        layer.bias.sub_(mean / spread)
    else:
        common = shown.mean(0)
        along = (layer.weight * common).flatten(1).sum(1) / common.square().sum()
        layer.weight.sub_(along.view(-1, *[1] * common.dim()) * common)
