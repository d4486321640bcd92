"""The operator graph, splits and topology."""

from __future__ import annotations

import subprocess
import sys

import pytest

from fused_mhc.errors import InputError
from fused_mhc.scheduler import (
    ComputeGraph,
    FillConfig,
    OperatorNode,
    OpType,
    RuntimeConfigC,
    SplitSpec,
    TaskSplitValue,
    TensorSpec,
    build_runtime_config,
)


class Recorder(FillConfig):
    """Writes nothing and remembers in which order it was called."""

    calls: list[str]

    def __init__(self) -> None:
        self.calls = []

    def fill(self, cfg: RuntimeConfigC, op: OperatorNode, tsv: TaskSplitValue) -> None:
        assert tsv.pre_task_num == 0
        self.calls.append(op.name)


def node(name: str, *, fill: FillConfig | None = None, **kwargs: object) -> OperatorNode:
    values: dict[str, object] = {
        "op_type": OpType.MHC_PIPELINE,
        "inputs": [],
        "outputs": [],
        "param_positions": [],
        "split_value": 1,
        "split_spec": SplitSpec(None, lambda topology: 3, []),
        "tiling_position": 1,
        "fill_config": fill,
        "diagnostic_name": name.title(),
    }
    return OperatorNode(name, **{**values, **kwargs})  # type: ignore[arg-type]


def test_scheduler_imports_without_torch() -> None:
    code = "import sys, fused_mhc.scheduler; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_topological_sort_is_a_fifo_over_insertion_and_edge_order() -> None:
    graph = ComputeGraph()
    for name in "dabcef":
        graph.add_op(node(name))
    graph.add_edge("a", "f").add_edge("a", "c").add_edge("b", "c").add_edge("d", "e")
    assert [op.name for op in graph.topological_sort()] == ["d", "a", "b", "e", "f", "c"]
    assert [op.name for op in graph.get_op("c").predecessors] == ["a", "b"]
    assert [op.name for op in graph.get_op("a").successors] == ["f", "c"]


def test_edges_take_operators_or_names_and_count_once() -> None:
    graph, a, b = ComputeGraph(), node("a"), node("b")
    assert graph.add_op(a).add_op(b).add_edge(a, "b").add_edge("a", b) is graph
    assert a.successors == [b]
    assert b.predecessors == [a]


def test_cycle_is_an_error() -> None:
    graph = ComputeGraph().add_op(node("a")).add_op(node("b")).add_op(node("c"))
    graph.add_edge("a", "b").add_edge("b", "c").add_edge("c", "b")
    with pytest.raises(ValueError, match=r"cycle.*b, c"):
        graph.topological_sort()
    with pytest.raises(ValueError, match="cycle"):
        build_runtime_config(graph, TaskSplitValue())


def test_unknown_and_repeated_names_are_errors() -> None:
    graph = ComputeGraph().add_op(node("a"))
    with pytest.raises(InputError, match="'a' again"):
        graph.add_op(node("a"))
    with pytest.raises(InputError, match="dst: expected an operator of this graph"):
        graph.add_edge("a", "b")
    with pytest.raises(InputError, match="'x'"):
        graph.get_op("x")


def test_splits_travel_along_named_inputs() -> None:
    x, y, z, w = (TensorSpec(name, [8, 8], index) for index, name in enumerate("xyzw"))
    count = lambda topology: topology.seq_size // 1024  # noqa: E731
    graph = ComputeGraph()
    graph.add_op(node("source", outputs=[x, w], split_spec=SplitSpec(None, count, [1, -1])))
    graph.add_op(node("carried", inputs=[x], outputs=[y], split_spec=SplitSpec([(0, 1)], count)))
    graph.add_op(node("lost", inputs=[y, w], outputs=[z], split_spec=SplitSpec([(0, 0), (1, 0)], count)))
    graph.add_edge("source", "carried").add_edge("carried", "lost").add_edge("source", "lost")
    graph.propagate_splits(TaskSplitValue())
    assert [graph.get_op(name).task_num for name in ("source", "carried", "lost")] == [8, 8, 1]
    assert [(t.split_dim, t.split_num) for t in (x, w, y, z)] == [(1, 8), (-1, 1), (0, 8), (-1, 1)]
    graph.propagate_splits(TaskSplitValue(seq_size=1024))
    assert [(t.split_dim, t.split_num) for t in (x, y)] == [(-1, 1), (-1, 1)]


def test_a_stage_without_tasks_is_an_error() -> None:
    graph = ComputeGraph().add_op(node("empty", split_spec=SplitSpec(None, lambda topology: 0)))
    with pytest.raises(InputError, match="empty: expected a positive number of tasks, got 0"):
        graph.propagate_splits(TaskSplitValue())


def test_topology_sizes() -> None:
    topology = TaskSplitValue()
    assert (topology.tp, topology.ep, topology.seq_size, topology.all_expert_num, topology.top_k) == (
        4,
        4,
        8192,
        32,
        8,
    )
    assert topology.single_rank_expert_num == 8
    assert topology.seq_all == 65536
    assert topology.per_expert_seq == 8192
    assert topology.per_rank_seq == 16384
    assert topology.per_expert_seq_to_other == 2048


@pytest.mark.parametrize(
    ("change", "message"),
    [
        *(
            ({name: bad}, f"{name} must be a positive integer")
            for name in ("tp", "ep", "seq_size")
            for bad in (0, -1)
        ),
        ({"all_expert_num": 0}, "all_expert_num must be a positive integer"),
        ({"top_k": 0}, "top_k must be a positive integer"),
        ({"seq_size": 2.0}, "seq_size must be a positive integer, got 2.0"),
        ({"all_expert_num": 4, "top_k": 5}, "cannot exceed"),
        ({"ep": 3}, "must be divisible"),
    ],
)
def test_topology_refuses(change: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        TaskSplitValue(**change)


def test_runtime_config_resets_counters_and_fills_in_order() -> None:
    fill = Recorder()
    graph = ComputeGraph().add_op(node("b", fill=fill)).add_op(node("a", fill=fill)).add_edge("b", "a")
    topology = TaskSplitValue()
    topology.pre_task_num = topology.pre_event_num = topology.pre_mix_task_num = 7
    config = build_runtime_config(graph, topology, rank_id=3, num_cube_cores=20)
    assert fill.calls == ["b", "a"]
    assert (config.task_num, config.num_workers, config.queue_capacity, topology.rank_id) == (6, 40, 100, 3)
    assert (topology.pre_event_num, topology.pre_mix_task_num) == (0, 0)


def test_runtime_config_refuses() -> None:
    graph = ComputeGraph().add_op(node("a", fill=Recorder()))
    with pytest.raises(ValueError, match="num_cube_cores must be positive, got 0"):
        build_runtime_config(graph, TaskSplitValue(), num_cube_cores=0)
    graph = ComputeGraph().add_op(node("a"))
    with pytest.raises(ValueError, match="a: expected a fill_config, got None"):
        build_runtime_config(graph, TaskSplitValue())
    huge = SplitSpec(None, lambda topology: 25_601)
    graph = ComputeGraph().add_op(node("a", fill=Recorder(), split_spec=huge))
    with pytest.raises(ValueError, match="at most 25600 tasks, got 25601"):
        build_runtime_config(graph, TaskSplitValue())


def test_fill_config_is_abstract() -> None:
    with pytest.raises(TypeError):
        FillConfig()  # type: ignore[abstract]
