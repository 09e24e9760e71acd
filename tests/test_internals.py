"""Each part of JAX in use that has no public name is there, and does what the kit relies on."""

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import checkify

from eqtrain._util import internals


def checked(x):
    checkify.check(x > 0, "x is {x}", x=x)
    return x


def jaxpr_of(function, *args):
    return jax.make_jaxpr(function)(*args).jaxpr


def test_check_p_is_what_checkify_check_binds():
    [equation] = [eqn for eqn in jaxpr_of(checked, 1.0).eqns if "err_tree" in eqn.params]
    assert equation.primitive is internals.check_p
    assert set(equation.params) == {"err_tree", "debug"}


def test_error_effect_is_that_of_a_jaxpr_with_a_check():
    def effects(function):
        found = jaxpr_of(function, 1.0).effects
        return [effect for effect in found if isinstance(effect, internals.ErrorEffect)]

    assert effects(checked) and not effects(jnp.sin)


def test_check_batching_rule_is_that_of_jax():
    assert internals.check_batching_rule.__module__ == "jax._src.checkify"
    # What is registered in its place calls it for all but the tracing of a loss.
    error, _ = checkify.checkify(jax.jit(jax.vmap(checked)))(jnp.array([1.0, -2.0, -3.0]))
    # One of the two that failed, whichever JAX keeps; the kit keeps both.
    assert str(error.get()) in ("x is -2.0 (`check` failed)", "x is -3.0 (`check` failed)")


def test_user_context_and_current_name_stack_give_an_equation_its_place():
    with jax.named_scope("outer"):
        inner = jaxpr_of(lambda x: jnp.sin(x), 1.0).eqns[0]

    def again(x):
        stack = internals.current_name_stack() + inner.source_info.name_stack
        with internals.user_context(inner.source_info.traceback, name_stack=stack):
            return inner.primitive.bind(x, **inner.params)

    [bound] = jaxpr_of(again, 1.0).eqns
    frames = bound.source_info.traceback.frames
    assert any(frame.function_name.endswith("<lambda>") for frame in frames)


def test_cache_size_counts_compilations():
    function = jax.jit(lambda x: x + 1)
    counts = [internals.cache_size(function)]
    for shape in (1, 1, 2):
        function(jnp.ones(shape))
        counts.append(internals.cache_size(function))
    assert counts == [0, 1, 1, 2]


def test_not_functionalized_is_in_the_error_of_a_check_that_nobody_looks_at():
    with pytest.raises(ValueError) as caught:
        jax.jit(checked).lower(1.0).compile()
    assert internals.NOT_FUNCTIONALIZED in str(caught.value)


def test_incompatible_devices_is_in_the_error_of_arrays_on_several():
    one, other = (jax.device_put(jnp.ones(2), device) for device in jax.devices()[:2])
    with pytest.raises(ValueError) as caught:
        jax.jit(jnp.add)(one, other)
    assert internals.INCOMPATIBLE_DEVICES in str(caught.value).lower()


def error_of(text, value):
    """What JAX's own checkify makes of one check."""

    @jax.jit
    def function(x):
        checkify.check(x > 0, text, x=x)

    return checkify.checkify(function)(jnp.float32(value))[0]


def test_failed_payload_of_and_described_read_what_a_check_was_given():
    for value, wrong in ((-2.0, True), (2.0, False)):
        error = error_of("x is {x}", value)
        assert [bool(one) for one in internals.failed(error)] == [wrong]
        exception = internals.described(error, internals.payload_of(error))
        assert exception.fmt_string == "x is {x}"


@pytest.mark.parametrize("text", ["set {1,2} is bad", "{name} is bad", "100% } done", "x is {x}"])
def test_error_text_of_what_cannot_be_filled_in_is_as_it_was_written(text):
    shown = internals.error_text(error_of(text, -2.0).get_exception())
    assert shown.startswith("x is -2.0" if text == "x is {x}" else text)
