"""Muon for the hidden matrices and AdamW for the rest, in one small optimizer.

Muon (Jordan et al., 2024): momentum, then the nearest orthogonal matrix by Newton-Schulz steps. Updates are scaled to
AdamW's size (0.2 in root mean square, Liu et al., 2025), so that one learning rate serves both. Matrices of one shape
are stacked and orthogonalized together: a step is a few dozen launches however many experts there are.
"""

import torch
from torch import Tensor, nn

_MOMENTUM = 0.95
_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_NEWTON_SCHULZ_STEPS = 5
_ADAM_MATRICES = ("embed_tokens.weight", "lm_head.weight", "mlp.gate.weight", "weights_proj.weight")
_ADAM_SHARE = 0.7  # AdamW's learning rate as a part of Muon's


def orthogonalize(matrices: Tensor) -> Tensor:
    """The orthogonal factor of each matrix of [n, rows, cols], roughly (singular values 0.7 to 1.2); bf16 on a GPU."""
    a, b, c = _COEFFICIENTS
    x = matrices.bfloat16() if matrices.is_cuda else matrices.float()
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    x = x / (x.norm(dim=(-2, -1), keepdim=True) + 1e-7)
    for _ in range(_NEWTON_SCHULZ_STEPS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


class Muon:
    """Muon over matrices [rows, cols] or stacks [n, rows, cols]; gradients are read from the parameters."""

    def __init__(self, parameters: list[nn.Parameter], *, weight_decay: float) -> None:
        self.lr = 0.0
        self._decay = weight_decay
        by_shape: dict[torch.Size, list[Tensor]] = {}
        for parameter in parameters:
            by_shape.setdefault(parameter.shape[-2:], []).append(parameter)
        self._groups = list(by_shape.values())
        self._momentum = [
            torch.zeros_like(torch.cat([p.detach().reshape(-1, *shape) for p in ps])) for shape, ps in by_shape.items()
        ]

    @torch.no_grad()
    def step(self) -> None:
        for parameters, momentum in zip(self._groups, self._momentum, strict=True):
            rows, cols = momentum.shape[-2:]
            gradients = [p.grad if p.grad is not None else torch.zeros_like(p) for p in parameters]
            gradient = torch.cat([g.reshape(-1, rows, cols) for g in gradients])
            momentum.lerp_(gradient, 1 - _MOMENTUM)
            update = orthogonalize(torch.lerp(gradient, momentum, _MOMENTUM)).to(momentum.dtype)
            sizes = [p.numel() // (rows * cols) for p in parameters]
            parts = [u.reshape(p.shape) for u, p in zip(update.split(sizes), parameters, strict=True)]
            torch._foreach_mul_(parameters, 1 - self.lr * self._decay)
            torch._foreach_add_(parameters, parts, alpha=-self.lr * 0.2 * max(rows, cols) ** 0.5)


class Optimizer:
    """Muon for hidden matrices; AdamW for embeddings, lm_head, routers, the small weights_proj and all vectors."""

    def __init__(self, parameters: dict[str, nn.Parameter]) -> None:
        hidden = {n: p for n, p in parameters.items() if p.dim() >= 2 and not n.endswith(_ADAM_MATRICES)}
        rest = [p for n, p in parameters.items() if n not in hidden]
        self._parameters = list(parameters.values())
        self._muon = Muon(list(hidden.values()), weight_decay=0.05)
        fused = self._parameters[0].is_cuda
        self._adam = torch.optim.AdamW(rest, lr=0.0, betas=(0.9, 0.95), weight_decay=0.0, fused=fused)

    def set_lr(self, lr: float) -> None:
        self._muon.lr = lr
        for group in self._adam.param_groups:
            group["lr"] = lr * _ADAM_SHARE

    def step(self) -> None:
        """Clip the gradient's norm to 1, update, and drop the gradients."""
        torch.nn.utils.clip_grad_norm_(self._parameters, 1.0)
        self._muon.step()
        self._adam.step()
        for parameter in self._parameters:
            parameter.grad = None
