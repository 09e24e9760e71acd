"""What is no fault, what is the earlier of two, and every kind of equation with a jaxpr inside."""

from typing import Any

import equinox as eqx
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.experimental import checkify
from jax.sharding import PartitionSpec as P

import eqtrain as et
from eqtrain.explain import Fault, all_faults, first_fault, statistics, watch


def faults(f: Any, *args: Any) -> list[Fault]:
    return all_faults(jax.jit(watch(f))(*args)[1])


def line_of(fault: Fault) -> str:
    return fault.site.frames[0].code


def masked(x: Any) -> Any:
    """Infinities that are meant: a mask by `where`, one by `log`, one as a constant, a maximum."""
    mask = jnp.tril(jnp.ones(x.shape, bool))
    constant = jnp.asarray(np.where(np.eye(3), 0.0, [[-np.inf, 0.0, 0.0]]), jnp.float32)
    scores = jnp.where(mask, x, -jnp.inf) + jnp.log(mask.astype(jnp.float32)) + constant.T
    best = jnp.max(x, axis=-1, initial=-jnp.inf, where=mask)
    unused = jnp.where(x > 0, 1 / x, jnp.nan)
    safe = jnp.where(x > 0, x, jnp.log(x - 100))
    return jax.nn.softmax(scores, -1).sum() + best.sum() + jnp.where(x > 0, safe, unused).sum()


def test_infinities_that_are_meant_are_no_fault():
    x = jnp.arange(9.0).reshape(3, 3) + 1
    assert faults(jax.value_and_grad(masked), x) == []


def test_infinities_that_are_meant_are_not_blamed_for_another_fault():
    def loss(x: Any) -> Any:
        return masked(x) + jnp.sqrt(x[0, 0] - 100)

    [forward, *_] = faults(jax.value_and_grad(loss), jnp.ones((3, 3)))
    assert (forward.kind, forward.site.primitive, forward.direction) == ("nan", "sqrt", "forward")
    assert forward.site.frames[0].function == "loss"


def test_mask_beside_a_nan_is_not_blamed():
    def loss(x: Any) -> Any:
        early = jnp.log(jnp.tril(jnp.ones(x.shape)))
        scores = jnp.arccos(x) + early
        return jnp.exp(jnp.where(x > 0, scores, -jnp.inf)).sum()

    [fault] = faults(loss, jnp.ones((3, 3)).at[2, 1].set(2.0))
    assert (fault.kind, fault.site.primitive) == ("nan", "acos")


def test_branch_of_where_that_is_not_taken_is_not_followed():
    def loss(x: Any) -> Any:
        bad_but_unused = jnp.log(x - 10)
        return jnp.where(x > 0, jnp.sqrt(1 - x), bad_but_unused).sum()

    [fault] = faults(loss, jnp.full(3, 2.0))
    assert fault.site.primitive == "sqrt"


def test_infinite_result_without_nan_is_traced_to_the_mask_if_nothing_made_it():
    def loss(x: Any) -> Any:
        logits = jnp.where(x > 1, x, -jnp.inf)  # the label is masked out
        return optax.softmax_cross_entropy_with_integer_labels(logits, jnp.asarray(0))

    [fault, *_] = faults(loss, jnp.asarray([0.0, 2.0, 3.0]))
    assert fault.kind == "inf"
    assert "-jnp.inf" in line_of(fault)


def test_logarithm_of_zero_is_blamed_for_the_product_behind_it():
    def entropy(p: Any) -> Any:
        logarithm = jnp.log(p)
        return -(p * logarithm).sum()

    [first, second] = faults(entropy, jnp.asarray([0.0, 1.0]))
    assert (first.kind, first.site.primitive) == ("inf", "log")
    assert (second.kind, second.site.primitive) == ("nan", "mul")


def test_bad_argument_is_blamed_by_name():
    def loss(model: Any, batch: Any) -> Any:
        return (batch["x"] @ model["weight"]).sum()

    batch = {"x": jnp.ones((2, 3)).at[1, 2].set(jnp.nan)}
    watched = watch(jax.value_and_grad(loss), names=("model", "batch"), probe=None)
    fault = first_fault(jax.jit(watched)({"weight": jnp.ones((3, 1))}, batch)[1])
    assert fault is not None
    assert (fault.kind, fault.site.primitive, fault.site.frames) == ("nan", "input", ())
    assert fault.name_of(fault.site.outputs[0].name) == "batch.x"


def test_value_that_is_closed_over_is_watched():
    @jax.jit
    def outer(hidden: Any) -> Any:
        return watch(lambda x: (x * hidden).sum())(jnp.ones(3))[1]

    fault = first_fault(outer(jnp.asarray([1.0, jnp.nan, 1.0])))
    assert fault is not None
    assert fault.name_of(fault.site.outputs[0].name) == "closed over"


def test_integer_division_by_zero_is_found_in_a_finite_result():
    def loss(x: Any) -> Any:
        return (x // (x - 2)).sum()

    fault = faults(loss, jnp.arange(4))[0]
    assert (fault.kind, fault.site.primitive) == ("division", "div")
    assert faults(loss, jnp.arange(3, 6)) == []


@pytest.mark.parametrize("mode", ["clip", "fill", "drop"])
def test_index_is_found_whatever_becomes_of_it(mode):
    def loss(table: Any, places: Any) -> Any:
        if mode == "drop":
            return table.at[places].add(1.0, mode="drop").sum()
        return table.at[places].get(mode=mode, fill_value=0).sum()

    table = jnp.ones((5, 2))
    [fault] = faults(loss, table, jnp.asarray([0, 9], jnp.int8))
    assert fault.kind == "index"
    assert faults(loss, table, jnp.asarray([0, -5], jnp.int8)) == []


def test_dynamic_slice_is_checked():
    def loss(x: Any, start: Any) -> Any:
        part = lax.dynamic_slice(x, (start,), (2,))
        return lax.dynamic_update_slice(x, part, (start + 1,)).sum()

    watched = jax.jit(watch(loss))
    assert [fault.site.primitive for fault in all_faults(watched(jnp.ones(4), 3)[1])] == [
        "dynamic_slice",
        "dynamic_update_slice",
    ]
    # Its first update is at 3, one beside the last that fits; the slice itself at 2 fits.
    assert [fault.site.primitive for fault in all_faults(watched(jnp.ones(4), 2)[1])] == [
        "dynamic_update_slice"
    ]
    assert all_faults(watched(jnp.ones(4), 1)[1]) == []


def test_while_loop_gives_the_first_turn():
    def loss(x: Any, turns: Any) -> Any:
        def body(state: Any) -> Any:
            turn, h = state
            return turn + 1, jnp.sqrt(h - 1)

        return lax.while_loop(lambda state: state[0] < turns, body, (0, x))[1].sum()

    watched = jax.jit(watch(loss))
    x = jnp.asarray([3.0, 5.0])
    fault = first_fault(watched(x, 5)[1])  # 3, 1.41, 0.64, then the root of a negative
    assert fault is not None
    assert (fault.site.primitive, fault.iterations, fault.site.loops) == ("sqrt", (2,), ("while",))
    found = statistics(jax.jit(watch(loss, probe=fault.site))(x, 5)[1], fault)
    expected = np.sqrt(np.sqrt(np.asarray(x) - 1) - 1) - 1
    assert found.inputs[0].minimum == pytest.approx(expected.min(), rel=1e-5)
    assert first_fault(watched(x, 2)[1]) is None
    assert first_fault(watched(x, 0)[1]) is None


def test_branch_that_is_taken_is_watched():
    def loss(x: Any, which: Any) -> Any:
        def second(x: Any) -> Any:
            return lax.cond(x[0] > 0, jnp.log, lambda x: x, x - 2.0)

        return lax.switch(which, [jnp.sin, second, jnp.cos], x).sum()

    watched = jax.jit(watch(loss))
    fault = first_fault(watched(jnp.ones(2), 1)[1])
    assert fault is not None and fault.site.primitive == "log"
    assert first_fault(watched(-jnp.ones(2), 1)[1]) is None
    assert first_fault(watched(jnp.ones(2), 2)[1]) is None


def test_while_loop_of_a_vmap_is_one_operation():
    def loss(x: Any, turns: Any) -> Any:
        def one(x: Any, turns: Any) -> Any:
            body = lambda state: (state[0] + 1, jnp.sqrt(state[1] - 1))  # noqa: E731
            return lax.while_loop(lambda state: state[0] < turns, body, (0, x))[1]

        return jax.vmap(one)(x, turns).sum()

    x = jnp.asarray([3.0, 5.0])
    assert faults(loss, x, jnp.asarray([2, 1])) == []
    [fault] = faults(loss, x, jnp.asarray([3, 1]))
    assert (fault.kind, fault.site.primitive) == ("nan", "while")


def test_checks_of_the_user_are_left_to_the_step():
    def loss(x: Any) -> Any:
        checkify.check(x[0] > 0, "never")
        return jnp.log(x).sum()

    assert faults(loss, -jnp.ones(2))[0].site.primitive == "log"


def test_nested_scans_give_both_steps_also_in_reverse():
    def loss(x: Any, weights: Any) -> Any:
        def outer(h: Any, rows: Any) -> Any:
            def inner(h: Any, weight: Any) -> Any:
                return jnp.log(h * weight) + 2, h

            return lax.scan(inner, h, rows)

        return lax.scan(outer, x, weights, reverse=True)[0].sum()

    weights = np.ones((4, 3, 2), np.float32)
    weights[2, 1, 0] = -1
    fault = faults(loss, jnp.full(2, 2.0), weights)[0]
    assert fault.iterations == (2, 1) and fault.site.primitive == "log"
    # In reverse the later index runs earlier.
    weights[3, 2, 1] = -1
    assert faults(loss, jnp.full(2, 2.0), weights)[0].iterations == (3, 2)


@jax.custom_vjp
def clipped(x: Any) -> Any:
    return jnp.where(x > 0, x, 0.0)


clipped.defvjp(lambda x: (clipped(x), x), lambda x, g: (g / x,))


def test_custom_derivatives_are_watched_in_both_directions():
    def loss(x: Any) -> Any:
        return clipped(jax.nn.softplus(x) - jax.nn.softplus(0.0)).sum()

    assert faults(loss, jnp.zeros(3)) == []
    fault = faults(jax.value_and_grad(loss), jnp.zeros(3))[0]
    assert (fault.kind, fault.direction) == ("division", "backward")
    assert "clipped(" in line_of(fault)


def test_forward_alone_is_watched_through_custom_derivatives_and_remat():
    def loss(x: Any) -> Any:
        h = jax.checkpoint(lambda x: jax.nn.gelu(clipped(x)))(x)
        return jax.nn.logsumexp(jnp.log(h))

    assert faults(loss, jnp.ones(3)) == []
    assert faults(loss, jnp.asarray([1.0, jnp.inf, 1.0]))[0].site.primitive == "input"


def test_line_is_that_of_this_call_and_not_of_the_first():
    @jax.jit
    def shared(x: Any) -> Any:
        return jnp.log(x)

    def first(x: Any) -> Any:
        return shared(x).sum()

    def second(x: Any) -> Any:
        return shared(x).sum()

    assert faults(first, jnp.ones(3)) == []  # traces `shared`, which is cached
    [fault] = faults(second, -jnp.ones(3))
    assert [frame.function for frame in fault.site.frames][:2] == ["shared", "second"]


def test_flags_of_vmap_and_of_what_is_no_array():
    class Model(eqx.Module):
        weight: Any
        activation: Any

    def loss(model: Model, x: Any) -> Any:
        return model.activation(model.weight * x), model.activation, "text", None

    model = Model(jnp.ones(2), jnp.log)
    (value, activation, text, nothing), flags = eqx.filter_jit(watch(loss))(model, jnp.ones(2))
    assert (activation, text, nothing) == (jnp.log, "text", None)
    assert value.tolist() == [0.0, 0.0] and all_faults(flags) == []

    def row(x: Any) -> Any:
        return watch(lambda x: jnp.log(x).sum())(x)[1]

    flags = jax.jit(jax.vmap(row))(jnp.asarray([[1.0], [-1.0], [2.0]]))
    fault = first_fault(flags)
    assert fault is not None and fault.lanes == ((1,),)


def test_number_of_names_must_be_that_of_arguments():
    with pytest.raises(ValueError, match="Got 2 names and 1 arguments"):
        watch(jnp.sin, names=("x", "y"))(1.0)


def test_shard_map_within_counts_as_one_operation():
    def loss(x: Any) -> Any:
        mesh = et.mesh(data=2)
        logs = jax.shard_map(jnp.log, mesh=mesh, in_specs=P("data"), out_specs=P("data"))
        return logs(x).sum()

    [fault] = faults(loss, jnp.asarray([1.0, -1.0]))
    assert fault.site.primitive == "shard_map"


def test_overflow_on_one_device_is_told_from_that_of_the_sum():
    mesh = et.mesh(data=4)

    def local(x: Any) -> Any:
        _, flags = watch(lambda x: lax.psum(x * 1e20, "data"))(x)
        return jax.tree.map(lambda leaf: leaf[None], flags)

    run = jax.jit(jax.shard_map(local, mesh=mesh, in_specs=P("data"), out_specs=P("data")))
    one = first_fault(run(jnp.asarray([1.0, 1e20, 1.0, 1.0])))
    assert one is not None and (one.site.primitive, one.lanes) == ("mul", ((1,),))
    total = first_fault(run(jnp.full(4, 2e18)))
    assert total is not None and total.site.primitive.startswith("psum")
    assert total.lanes == ((0,), (1,), (2,), (3,))
