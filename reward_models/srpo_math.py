"""The formulas of SRPO (arXiv 2511.15605 and its code, siiRL) as pure functions on tensors.

E is float [n d], one row per trajectory; distances and rewards are float32 [n].
"""

from __future__ import annotations

import torch
from torch import Tensor

_FLAT = 1e-6  # a range of distances below this says nothing


def standardisation(rows: Tensor) -> tuple[Tensor, Tensor]:
    """Mean and population standard deviation per dimension; dimensions without variance get 1."""
    scale = rows.std(0, correction=0)
    return rows.mean(0), torch.where(scale > 0, scale, torch.ones_like(scale))


def to_space(rows: Tensor, space: str, mean: Tensor, scale: Tensor) -> Tensor:
    """Rows as distances are measured in: as they are, standardised, or of unit length."""
    if space == "standardised":
        return (rows - mean) / scale
    return torch.nn.functional.normalize(rows, dim=-1) if space == "cosine" else rows


def distances_to(rows: Tensor, centres: Tensor, space: str) -> Tensor:
    """Distance of each row to its nearest centre: Euclidean, or 1 − cosine in the space
    "cosine"."""
    if space == "cosine":
        unit = torch.nn.functional.normalize(centres, dim=-1)
        return (1.0 - rows @ unit.T).amin(1)
    return torch.cdist(rows, centres, compute_mode="donot_use_mm_for_euclid_dist").amin(1)


def eps_from_data(rows: Tensor, neighbours: int, quantile: float) -> float:
    """A radius for DBSCAN: the quantile of the distance to the k-th nearest other row.

    The published constant 0.5 is far below any distance in a standardised space of a thousand
    dimensions (two rows of n are on average sqrt(2·d·n/(n − 1)) apart), so that every point would
    be noise.
    """
    distances = torch.cdist(rows, rows, compute_mode="donot_use_mm_for_euclid_dist")
    k = min(neighbours, len(rows) - 1)
    return float(distances.sort(1).values[:, k].quantile(quantile)) if k > 0 else 0.0


def dbscan(rows: Tensor, eps: float, min_samples: int = 2) -> Tensor:
    """Labels int64 [n] of density-based clusters (Ester et al. 1996), −1 for noise; a point counts
    as its own neighbour.

    Clusters grow from core points in the order of the rows; a border point belongs to the first
    cluster that reaches it.
    """
    near = torch.cdist(rows, rows, compute_mode="donot_use_mm_for_euclid_dist") <= eps
    core = (near.sum(1) >= min_samples).tolist()
    labels = [-1] * len(rows)
    cluster = 0
    for seed in range(len(rows)):
        if labels[seed] != -1 or not core[seed]:
            continue
        labels[seed], stack = cluster, [seed]
        while stack:
            for j in torch.nonzero(near[stack.pop()]).flatten().tolist():
                if labels[j] == -1:
                    labels[j] = cluster
                    if core[j]:
                        stack.append(j)
        cluster += 1
    return torch.tensor(labels, dtype=torch.long)


def kmeans(rows: Tensor, clusters: int, iterations: int = 50) -> Tensor:
    """Labels int64 [n] of Lloyd's algorithm from farthest-point seeds: the same result each
    time."""
    clusters = min(clusters, len(rows))
    seeds = [int((rows - rows.mean(0)).square().sum(1).argmin())]
    while len(seeds) < clusters:
        seeds.append(int(torch.cdist(rows, rows[seeds]).amin(1).argmax()))
    centres = rows[seeds]
    labels = torch.zeros(len(rows), dtype=torch.long)
    for _ in range(iterations):
        new = torch.cdist(rows, centres).argmin(1)
        if torch.equal(new, labels) and _ > 0:
            break
        labels = new
        centres = torch.stack(
            [
                rows[labels == k].mean(0) if (labels == k).any() else centres[k]
                for k in range(clusters)
            ]
        )
    return labels


def shape_minmax(distances: Tensor, scale: float = 0.6, slope: float = 10.0) -> Tensor:
    """Reward of failures as coded in siiRL: scale · sigmoid(slope · (0.5 − u)), u the distance
    scaled to 0 … 1 over the failures (0.5 for all of them where their distances agree)."""
    low, high = distances.min(), distances.max()
    u = (distances - low) / (high - low) if high - low >= _FLAT else torch.full_like(distances, 0.5)
    return scale * torch.sigmoid(slope * (0.5 - u))


def shape_zscore(distances: Tensor, scale: float = 0.8, slope: float = 1.0) -> Tensor:
    """Reward of failures as in the paper, its sign put right: scale · sigmoid(−slope · z), z the
    distance standardised over the failures (population standard deviation). ``scale`` is the
    paper's alpha."""
    spread = distances.std(correction=0)
    z = (distances - distances.mean()) / spread if spread >= _FLAT else torch.zeros_like(distances)
    return scale * torch.sigmoid(-slope * z)
