"""`collectives_of` reads the text of compiled programs: hand-written ones, counted by hand."""

import re

import pytest

import eqtrain as et
from eqtrain._programs.cost import collectives_of, replica_groups

SUM = """
%sum (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %add = f32[] add(%a, %b)
}
"""


def module(entry: str, *computations: str) -> str:
    """A module whose entry computation holds the lines `entry`."""
    lines = "\n".join(f"  {line.strip()}" for line in entry.strip().splitlines())
    head = "HloModule jit_step, is_scheduled=true, num_partitions=4\n"
    return (
        f"{head}{SUM}{''.join(computations)}\nENTRY %main (x: f32[8,3]) -> f32[] {{\n{lines}\n}}\n"
    )


def loop(name: str, line: str) -> str:
    """The two computations of a loop with `line` in its body."""
    return f"""
%{name}_body.1 (carry: (s32[], f32[8])) -> (s32[], f32[8]) {{
  %carry = (s32[], f32[8]{{0}}) parameter(0)
  {line}
  ROOT %next = (s32[], f32[8]{{0}}) tuple(%i, %r)
}}

%{name}_cond.1 (carry: (s32[], f32[8])) -> pred[] {{
  %carry = (s32[], f32[8]{{0}}) parameter(0)
  ROOT %less = pred[] compare(%i, %n), direction=LT
}}
"""


def while_of(name: str, turns: int | None) -> str:
    known = "" if turns is None else f', backend_config={{"known_trip_count":{{"n":"{turns}"}}}}'
    return (
        f"%w_{name} = (s32[], f32[8]{{0}}) while(%t), condition=%{name}_cond.1, "
        f"body=%{name}_body.1{known}"
    )


ALL_REDUCE = (
    "%r = f32[8]{0} all-reduce(%p), channel_id=1, replica_groups={{0,1,2,3}}, to_apply=%sum"
)


# Kind, shapes, and bytes counted by hand.
Counted = tuple[str, tuple[str, ...], int]


def counted(text: str) -> list[Counted]:
    found = collectives_of(text)
    assert all(collective.times == 1 for collective in found)
    return [(collective.kind, collective.shapes, collective.bytes) for collective in found]


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        (ALL_REDUCE, ("all-reduce", ("f32[8]",), 32)),
        (
            "ROOT %r = (f32[8,3]{1,0}, f32[]) all-reduce(%p, %q), to_apply=%sum",
            ("all-reduce", ("f32[8,3]", "f32[]"), 100),
        ),
        (
            # Long tuples are printed with the indices of their entries.
            "%r = (s32[], f32[], f32[], f32[], f32[], /*index=5*/bf16[16]{0}) all-reduce(%a, %b)",
            ("all-reduce", ("s32[]", "f32[]", "f32[]", "f32[]", "f32[]", "bf16[16]"), 52),
        ),
        (
            "%g.7 = bf16[16,8]{1,0:T(8,128)(2,1)} all-gather(%p), dimensions={0}",
            ("all-gather", ("bf16[16,8]",), 256),
        ),
        (
            "r = f32[2,8]{1,0} reduce-scatter(p), dimensions={0}, to_apply=sum",
            ("reduce-scatter", ("f32[2,8]",), 64),
        ),
        (
            "%a = (u8[4]{0}, u8[4]{0}) all-to-all(%p, %q)",
            ("all-to-all", ("u8[4]", "u8[4]"), 8),
        ),
        (
            "%c = pred[6]{0} collective-permute(%p), source_target_pairs={{0,1},{1,0}}",
            ("collective-permute", ("pred[6]",), 6),
        ),
    ],
)
def test_one_collective(line: str, expected: Counted):
    assert counted(module(line)) == [expected]


@pytest.mark.parametrize(
    ("groups", "devices"),
    [
        ("{{0,1,2,3}}", 4),
        ("{{0,2},{1,3}}", 2),
        ("[1,4]<=[4]", 4),
        ("[4,2]<=[2,4]T(1,0)", 2),
        ("mesh['data'=4,'model'=2] {'data'}", 4),
        ("mesh['data'=4,'model'=2] {'model'}", 2),
        ("mesh['data'=4,'model'=2] {'data','model'}", 8),
    ],
)
def test_devices_that_take_part(groups: str, devices: int):
    line = f"%r = f32[8]{{0}} all-reduce(%p), channel_id=1, replica_groups={groups}, to_apply=%sum"
    assert [found.devices for found in collectives_of(module(line))] == [devices]


@pytest.mark.parametrize(
    "groups",
    [
        "{{0}}",
        "{{0},{1},{2},{3}}",
        "[4,1]<=[4]",
        "mesh['data'=1] {'data'}",
        "mesh['data'=4,'model'=1] {'model'}",
    ],
)
def test_a_device_with_itself_is_left_out(groups: str):
    line = f"%r = f32[8]{{0}} all-reduce(%p), channel_id=1, replica_groups={groups}, to_apply=%sum"
    assert collectives_of(module(line)) == []


# A pair of ops is one collective, and what each device gets is the type of the second. The first
# names operands, and scratch space, in ways that differ from kind to kind.
PAIRS = [
    (
        "%s = f32[8]{0} all-reduce-start(%p), replica_groups={{0,1,2,3}}, to_apply=%sum",
        "%d = f32[8]{0} all-reduce-done(%s)",
        ("all-reduce", ("f32[8]",), 32),
    ),
    (
        # Of an all-reduce the first op has the results alone.
        "%s = (f32[8]{0}, f32[2]{0}) all-reduce-start(%p, %q), replica_groups={{0,1,2,3}}, to_apply=%sum",
        "%d = (f32[8]{0}, f32[2]{0}) all-reduce-done(%s)",
        ("all-reduce", ("f32[8]", "f32[2]"), 40),
    ),
    (
        "%s = (f32[2]{0}, f32[8]{0}) all-gather-start(%p), replica_groups={{0,1,2,3}}, dimensions={0}",
        "%d = f32[8]{0} all-gather-done(%s)",
        ("all-gather", ("f32[8]",), 32),
    ),
    (
        "%s = ((f32[2]{0}, bf16[1]{0}), (f32[8]{0}, bf16[4]{0})) all-gather-start(%p, %q), replica_groups={{0,1,2,3}}",
        "%d = (f32[8]{0}, bf16[4]{0}) all-gather-done(%s)",
        ("all-gather", ("f32[8]", "bf16[4]"), 40),
    ),
    (
        "%s = ((f32[8]{0}), f32[2]{0}) reduce-scatter-start(%p), replica_groups={{0,1,2,3}}, dimensions={0}, to_apply=%sum",
        "%d = f32[2]{0} reduce-scatter-done(%s)",
        ("reduce-scatter", ("f32[2]",), 8),
    ),
    (
        "%s = (f32[8]{0}, f32[8]{0}, u32[], u32[]) collective-permute-start(%p), replica_groups={{0,1,2,3}}",
        "%d = f32[8]{0} collective-permute-done(%s)",
        ("collective-permute", ("f32[8]",), 32),
    ),
]


@pytest.mark.parametrize(("start", "done", "expected"), PAIRS)
def test_a_start_and_its_done_are_one_collective(start: str, done: str, expected: Counted):
    text = module(f"{start}\n%other = f32[8]{{0}} add(%a, %b)\n{done}")
    assert counted(text) == [expected]
    assert [found.devices for found in collectives_of(text)] == [4]


def test_loops_multiply():
    inner = loop("inner", ALL_REDUCE)
    outer = loop("outer", while_of("inner", 3))
    text = module(f"{while_of('outer', 4)}\n{ALL_REDUCE}", inner, outer)
    assert sorted(found.times for found in collectives_of(text)) == [1, 12]
    # The same body run by two loops.
    text = module(f"{while_of('inner', 3)}\n{while_of('inner', 5).replace('w_', 'v_')}", inner)
    assert [found.times for found in collectives_of(text)] == [8]


def test_called_computations_count():
    call = "\n%region (p: f32[8]) -> f32[8] {\n  ROOT " + ALL_REDUCE + "\n}\n"
    for line in (
        "%c = f32[8]{0} call(%p), to_apply=%region",
        "%c = f32[8]{0} conditional(%i, %p, %q), branch_computations={%region, %sum}",
        "%c = f32[8]{0} conditional(%i, %p, %q), true_computation=%region, false_computation=%sum",
    ):
        assert [found.times for found in collectives_of(module(line, call))] == [1], line
    # One that nothing calls does not run.
    assert collectives_of(module("%x = f32[8]{0} add(%p, %p)", call)) == []


def test_a_loop_of_unknown_length_is_refused_only_with_a_collective():
    text = module(while_of("inner", None), loop("inner", ALL_REDUCE))
    with pytest.raises(ValueError, match="must have a known number of turns"):
        collectives_of(text)
    assert collectives_of(module(while_of("inner", None), loop("inner", "%r = f32[8] add()"))) == []


def test_names_and_comments_are_no_collectives():
    text = module(
        """
        %all-reduce.1 = f32[8]{0} add(%all-gather.3, %p), metadata={op_name="jit(all-reduce(x))"}
        %get = f32[8]{0} get-tuple-element(%all-reduce.2), index=0
        %done = f32[8]{0} copy-done(%start)
        """
    )
    assert collectives_of(text) == []
    assert re.search("all-reduce", text)  # it is the reading that leaves them out


@pytest.mark.parametrize(
    ("dtype", "expected"), [("pred", 8), ("bf16", 16), ("f8e4m3fn", 8), ("s4", 4), ("c64", 64)]
)
def test_bytes_of_dtypes(dtype: str, expected: int):
    line = ALL_REDUCE.replace("f32[8]", f"{dtype}[8]")
    assert counted(module(line)) == [("all-reduce", (f"{dtype}[8]",), expected)]


@pytest.mark.parametrize(
    ("groups", "axes"),
    [
        ("{{0,1,2,3,4,5,6,7}}", ("data", "fsdp", "model")),
        ("{}", ("data", "fsdp", "model")),
        ("{{0,4},{1,5},{2,6},{3,7}}", ("data",)),
        ("{{0,2},{1,3},{4,6},{5,7}}", ("fsdp",)),
        ("{{0,1},{2,3},{4,5},{6,7}}", ("model",)),
        ("{{1,0},{3,2},{5,4},{7,6}}", ("model",)),  # in whichever order
        ("{{0,1,4,5},{2,3,6,7}}", ("data", "model")),
        ("[4,2]<=[8]", ("model",)),
        ("[4,2]<=[2,4]T(1,0)", ("data",)),
        ("[2,4]<=[2,2,2]T(1,0,2)", ("data", "model")),
        ("mesh['data'=2,'fsdp'=2,'model'=2] {'fsdp'}", ("fsdp",)),
        ("{{0,3},{1,2},{4,7},{5,6}}", None),  # along no axis
    ],
)
def test_the_axes_that_a_collective_goes_over(groups: str, axes: tuple[str, ...] | None):
    line = f"%r = f32[8]{{0}} all-reduce(%p), channel_id=1, replica_groups={groups}, to_apply=%sum"
    mesh = et.mesh(data=2, one=1, fsdp=2, model=2)
    assert [found.axes for found in collectives_of(module(line), mesh)] == [axes]


def test_the_axes_of_a_permutation():
    pairs = "source_target_pairs={{0,1},{1,0},{2,3},{3,2},{4,5},{5,4},{6,7},{7,6}}"
    line = f"%r = f32[8]{{0}} collective-permute(%p), channel_id=1, {pairs}"
    mesh = et.mesh(data=4, model=2)
    assert [found.axes for found in collectives_of(module(line), mesh)] == [("model",)]


@pytest.mark.parametrize(
    ("text", "groups"),
    [
        ("replica_groups={{0,1},{2,3}}", [[0, 1], [2, 3]]),
        ("replica_groups=[2,2]<=[4]", [[0, 1], [2, 3]]),
        ("replica_groups=[2,2]<=[2,2]T(1,0)", [[0, 2], [1, 3]]),
        ("replica_groups=mesh[a=2,b=2] {b}", [[0, 1], [2, 3]]),
        ("replica_groups=mesh['a'=2,'b'=2], device_ids=([2,2]T(1,0)) {'b'}", [[0, 2], [1, 3]]),
        ("replica_groups=mesh['a'=1,'b'=2,'c'=2], device_ids=([4]) {'b'}", [[0, 2], [1, 3]]),
        ("source_target_pairs={{0,1},{1,0},{2,3},{3,2}}", [[0, 1], [2, 3]]),
        ("replica_groups={}", []),
        ("channel_id=1", []),
    ],
)
def test_each_form_of_groups_is_read(text, groups):
    assert replica_groups(f"f32[8]{{0}} all-reduce(%p), {text}, to_apply=%sum") == groups


@pytest.mark.parametrize("text", ["replica_groups=ring(0..3)", "replica_groups=mesh[a=4], ids {a}"])
def test_a_form_of_groups_that_is_not_known_is_an_error(text):
    line = ALL_REDUCE.replace("replica_groups={{0,1,2,3}}", text)
    assert text in line
    with pytest.raises(ValueError, match=r"a form that is known. Got replica_groups="):
        collectives_of(module(line))
