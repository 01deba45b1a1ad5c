"""AdamW with the state layout of the fused Adam of Transformer Engine and apex, in plain torch.

Megatron's distributed optimizer saves and restores the state of *fused* Adam: the step count in
the parameter group, only ``exp_avg`` and ``exp_avg_sq`` per parameter.  With ``torch.optim.AdamW``
its checkpoint code fails or counts steps wrongly (0.19.2: empty shards, a missing ``step`` key, one
``step`` tensor shared by all parameters).  This stand-in makes a resumed run bit-equal without
either package.
Invariant the tests check: the updates are torch.optim's; saved, loaded and continued ==
uninterrupted, bit for bit.  Not covered: precision-aware states, CUDA graphs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor


class GroupStepAdam(torch.optim.Optimizer):
    """Adam (Kingma and Ba 2015), decoupled weight decay (Loshchilov and Hutter 2019) by default.

    Args:
        params: parameters or parameter groups, as for every torch optimizer.
        adam_w_mode: decoupled weight decay; False adds the decay to the gradient.
        bias_correction: divide the moments by ``1 - beta**step``.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        adam_w_mode: bool = True,
        bias_correction: bool = True,
        capturable: bool = False,
    ) -> None:
        if capturable:
            raise ValueError("this Adam has no CUDA-graph mode: drop --optimizer-cuda-graph.")
        defaults = {
            "lr": lr,
            "betas": betas,
            "eps": eps,
            "weight_decay": weight_decay,
            "bias_correction": bias_correction,
        }
        super().__init__(params, defaults)
        self.adam_w_mode = adam_w_mode

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> float | None:  # type: ignore[override]
        """One update of every parameter with a gradient; an empty group counts the step as well.

        closure: recomputes the loss, with gradients; its value is returned.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            group["step"] = group.get("step", 0) + 1
            for param in group["params"]:
                if param.grad is not None:
                    self._update(param, group=group)
        return loss

    def _update(self, param: Tensor, *, group: dict[str, Any]) -> None:
        state = self.state[param]
        if not state:
            state["exp_avg"] = torch.zeros_like(param)
            state["exp_avg_sq"] = torch.zeros_like(param)
        beta1, beta2 = group["betas"]
        grad = param.grad
        assert grad is not None, "step() passes parameters that have a gradient"
        if self.adam_w_mode:
            param.mul_(1 - group["lr"] * group["weight_decay"])
        elif group["weight_decay"]:
            grad = grad.add(param, alpha=group["weight_decay"])
        state["exp_avg"].lerp_(grad, 1 - beta1)
        state["exp_avg_sq"].mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
        correction1, correction2 = 1.0, 1.0
        if group["bias_correction"]:
            correction1 = 1 - beta1 ** group["step"]
            correction2 = 1 - beta2 ** group["step"]
        denominator = (state["exp_avg_sq"].sqrt() / correction2**0.5).add_(group["eps"])
        param.addcdiv_(state["exp_avg"], denominator, value=-group["lr"] / correction1)
