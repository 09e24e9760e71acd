"""The optimizers of optax that `test_optimizers.py` trains, and why it leaves out the others."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import optax
import optax.contrib

import eqtrain as et


def wrapped_adam(wrap: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return wrap(optax.adam(0.01, eps=EPS), *args, **kwargs)


# A sixtieth of a typical gradient. Adam's kind divides elements that cancel out to nothing by as
# little: with the default of 1e-8 their rounding would be a hundredth of a step.
EPS = 1e-5
# The settings make all leaves move by more than MOVED in five steps.
OPTIMIZERS: dict[str, Callable[[], Any]] = {
    "acprop": lambda: optax.contrib.acprop(0.01, eps=1e-3),
    "adabelief": lambda: optax.adabelief(0.01, eps=EPS),
    "adadelta": lambda: optax.adadelta(30.0),
    "adafactor": lambda: optax.adafactor(0.01),
    "adagrad": lambda: optax.adagrad(1.0),
    "adam": lambda: optax.adam(0.01, eps=EPS),
    "adamax": lambda: optax.adamax(0.01, eps=EPS),
    "adamaxw": lambda: optax.adamaxw(0.01, eps=EPS),
    "adamw": lambda: optax.adamw(0.01, eps=EPS, weight_decay=0.1, mask=et.matching("weight")),
    "adan": lambda: optax.adan(0.01, eps=EPS),
    "ademamix": lambda: optax.contrib.ademamix(0.01, eps=EPS),
    "adopt": lambda: optax.contrib.adopt(0.03, eps=EPS),
    "amsgrad": lambda: optax.amsgrad(0.01, eps=EPS),
    "apply_if_finite": lambda: wrapped_adam(optax.apply_if_finite, 2),
    "cocob": lambda: optax.contrib.cocob(eps=EPS),
    "dadapt_adamw": lambda: optax.contrib.dadapt_adamw(estim_lr0=0.01, eps=EPS),
    "dog": lambda: optax.contrib.dog(init_step=("distance", 0.1)),
    "dowg": lambda: optax.contrib.dowg(init_estim_sq_dist=0.1),
    "flatten": lambda: wrapped_adam(optax.flatten),
    "fromage": lambda: optax.fromage(0.01),
    "galore": lambda: optax.contrib.galore(
        0.01, rank=32, update_proj_gap=2, base_optimizer=optax.scale_by_adam(eps=EPS)
    ),
    "inject_hyperparams": lambda: optax.inject_hyperparams(optax.adam)(
        optax.linear_schedule(0.01, 0.0, 20), eps=EPS
    ),
    "lamb": lambda: optax.lamb(0.01, eps=EPS, weight_decay=0.1),
    "lars": lambda: optax.lars(10.0, weight_decay=0.1),
    "lbfgs": lambda: optax.lbfgs(1.0, linesearch=None),
    "lion": lambda: optax.lion(0.01),
    "madgrad": lambda: optax.contrib.madgrad(0.01),
    "masked": lambda: wrapped_adam(optax.masked, et.matching("weight")),
    "mechanize": lambda: wrapped_adam(optax.contrib.mechanize, s_init=0.1),
    "momo": lambda: optax.contrib.momo(10.0),
    "momo_adam": lambda: optax.contrib.momo_adam(0.01, eps=EPS),
    "MultiSteps": lambda: wrapped_adam(optax.MultiSteps, 2).gradient_transformation(),
    "muon": lambda: optax.contrib.muon(0.01, adam_eps_root=1e-10),
    "nadam": lambda: optax.nadam(0.01, eps=EPS),
    "nadamw": lambda: optax.nadamw(0.01, eps=EPS),
    "noisy_sgd": lambda: optax.noisy_sgd(1.0, eta=1e-6, key=0),
    "novograd": lambda: optax.novograd(0.1),
    "optimistic_adam_v2": lambda: optax.optimistic_adam_v2(0.01, eps=EPS),
    "optimistic_gradient_descent": lambda: optax.optimistic_gradient_descent(1.0),
    "partition": lambda: optax.partition(
        {True: optax.adam(0.01, eps=EPS), False: optax.sgd(1.0)}, et.matching("weight")
    ),
    "polyak_sgd": lambda: optax.polyak_sgd(max_learning_rate=1.0),
    "prodigy": lambda: optax.contrib.prodigy(estim_lr0=0.01, eps=EPS),
    "radam": lambda: optax.radam(1.0, eps=EPS),
    "reduce_on_plateau": lambda: optax.chain(
        optax.adam(0.01, eps=EPS), optax.contrib.reduce_on_plateau(patience=1, cooldown=0, rtol=0.5)
    ),
    "rmsprop": lambda: optax.rmsprop(0.01, eps=EPS),
    "rprop": lambda: optax.rprop(0.01),
    "sam": lambda: optax.GradientTransformation(
        # optax 0.2.8 says that it takes any extra argument, and refuses `value=`.
        *optax.contrib.sam(
            optax.adam(0.01, eps=EPS), optax.chain(optax.contrib.normalize(), optax.sgd(0.1))
        )
    ),
    "schedule_free": lambda: optax.contrib.schedule_free(optax.sgd(1.0), 1.0),
    "schedule_free_adamw": lambda: optax.contrib.schedule_free_adamw(0.01, eps=EPS),
    "schedule_free_sgd": lambda: optax.contrib.schedule_free_sgd(1.0),
    "sgd": lambda: optax.sgd(1.0, momentum=0.9),
    "sign_sgd": lambda: optax.sign_sgd(0.01),
    "signum": lambda: optax.signum(0.01),
    "simplified_ademamix": lambda: optax.contrib.simplified_ademamix(0.01, eps=EPS),
    "sm3": lambda: optax.sm3(0.1),
    "yogi": lambda: optax.yogi(0.1),
}

# By reason. Those named `scale_by_` are the insides of the others and are left out by that name.
LEFT_OUT = {
    "changes gradients or params and is no optimizer": (
        "adaptive_grad_clip add_decayed_weights add_noise apply_every centralize clip "
        "clip_by_block_rms clip_by_global_norm ema freeze identity keep_params_nonnegative "
        "measure_with_ema normalize normalize_by_update_norm scale set_to_zero snapshot stateless "
        "stateless_with_tree_map trace zero_nans"
    ),
    "joins or wraps optimizers, as others do that are trained": (
        "chain conditionally_mask conditionally_transform inject_stateful_hyperparams "
        "multi_transform named_chain selective_transform with_extra_args_support"
    ),
    "is for complex params, of which the model here has none": ("split_real_and_imaginary"),
    "needs the gradient of each example": "differentially_private_aggregate dpsgd",
    "needs `obj_fn=` for products with the Hessian": "hutchinson_estimator_diag_hessian sophia",
    "deprecated, and says so whenever it is called": "optimistic_adam",
    "trains pairs of fast and slow params": "lookahead",
    "reads the params out of a state": "schedule_free_eval_params",
}
