"""The conservation laws of the core, stated once. Tests check them after every step, the engine when it is idle.

`check` reads everything and changes nothing; it costs time in proportion to the pool.
"""

from __future__ import annotations

from collections import Counter
from typing import NoReturn

from pellucid.core.block_pool import BlockState
from pellucid.core.config import SchedulerConfig
from pellucid.core.errors import InvariantViolation
from pellucid.core.plan import StepPlan
from pellucid.core.scheduler import Scheduler
from pellucid.core.sequence import Sequence, Status


def check(scheduler: Scheduler) -> None:
    """Raise InvariantViolation, naming the law and the numbers, if the scheduler's state breaks one."""
    _check_membership(scheduler)
    _check_pool(scheduler)
    _check_tree(scheduler)
    for sequence in scheduler.running.values():
        _check_running(scheduler, sequence)


def check_plan(plan: StepPlan, config: SchedulerConfig) -> None:
    """Raise InvariantViolation if a plan breaks the budget or computes a sequence twice in one step."""
    ids = [chunk.seq_id for chunk in plan.chunks]
    if len(set(ids)) != len(ids):
        _broken(f"step {plan.step_id} has two chunks of one sequence: {ids}")
    if len(ids) > config.max_running:
        _broken(f"step {plan.step_id} runs {len(ids)} sequences; max_running is {config.max_running}")
    if any(chunk.end <= chunk.start for chunk in plan.chunks):
        _broken(f"step {plan.step_id} has an empty chunk: {plan}")
    if config.chunked_prefill and plan.num_tokens > config.token_budget:
        _broken(f"step {plan.step_id} computes {plan.num_tokens} tokens; the budget is {config.token_budget}")


def _broken(message: str) -> NoReturn:
    raise InvariantViolation(message)


def _check_membership(scheduler: Scheduler) -> None:
    """Every live sequence is in exactly one place, and those that wait hold nothing."""
    waiting = list(scheduler.waiting)
    running = list(scheduler.running.values())
    places = Counter(sequence.id for sequence in waiting + running)
    if sorted(places) != [s.id for s in scheduler.sequences()] or any(n != 1 for n in places.values()):
        _broken(f"live sequences {[s.id for s in scheduler.sequences()]} are not those queued or running: {places}")
    for sequence in waiting:
        if sequence.status is not Status.WAITING or sequence.block_table or sequence.node is not None:
            _broken(f"waiting {sequence!r} holds blocks or a pin")
    if len(running) > scheduler.config.max_running:
        _broken(f"{len(running)} sequences run; max_running is {scheduler.config.max_running}")
    if not scheduler.claims.held_only_by(scheduler.running):
        _broken("a sequence that does not run still claims a block")


def _check_pool(scheduler: Scheduler) -> None:
    """Reference counts are what the block tables say; the four counts are what the states say, and add up."""
    pool = scheduler.kv.pool
    held = Counter(block for sequence in scheduler.running.values() for block in sequence.block_table)
    states: Counter[BlockState] = Counter()
    for block in range(pool.num_blocks):
        states[pool.state(block)] += 1
        if pool.refs[block] != held[block]:
            _broken(f"block {block} has {pool.refs[block]} references; {held[block]} block tables hold it")
    counts = {
        BlockState.FREE: pool.num_free,
        BlockState.ACTIVE: pool.num_active,
        BlockState.CACHED: pool.num_cached,
        BlockState.IN_FLIGHT: pool.num_in_flight,
    }
    if any(states[state] != count for state, count in counts.items()) or sum(counts.values()) != pool.num_blocks:
        _broken(f"block counts {counts} are not the states {dict(states)} of {pool.num_blocks} blocks")
    for sequence in scheduler.running.values():
        if len(set(sequence.block_table)) != len(sequence.block_table):
            _broken(f"{sequence!r} holds a block twice: {sequence.block_table}")


def _check_tree(scheduler: Scheduler) -> None:
    """One node a block; pins are what sequences hold; whatever is held is held up to the root."""
    pool, tree = scheduler.kv.pool, scheduler.kv.tree
    pins = Counter(id(s.node) for s in scheduler.running.values() if s.node is not None)
    blocks = []
    for node in tree.nodes():
        if not node.on_device:
            continue
        blocks.append(node.block)
        if not pool.in_tree(node.block):
            _broken(f"block {node.block} is in the tree; the pool does not know")
        if node.pins != pins[id(node)]:
            _broken(f"block {node.block} has {node.pins} pins; {pins[id(node)]} sequences end there")
        parent = node.parent
        if parent is not None and parent.parent is not None and pool.refs[parent.block] < pool.refs[node.block]:
            _broken(f"block {node.block} is held more often than block {parent.block} before it")
    if len(set(blocks)) != len(blocks) or len(blocks) != tree.num_blocks:
        _broken(f"{len(blocks)} nodes hold {len(set(blocks))} blocks; the tree counts {tree.num_blocks}")
    _check_host(scheduler)
    in_tree = sum(pool.in_tree(block) for block in range(pool.num_blocks))
    if in_tree != len(blocks):
        _broken(f"the pool says {in_tree} blocks are in the tree; it has {len(blocks)}")
    for namespace, root in tree.roots().items():
        if root.children is None and root.pins == 0:
            _broken(f"namespace {namespace!r} is empty and still has a root")


def _check_host(scheduler: Scheduler) -> None:
    """A node is somewhere, below nodes that are somewhere; a host block is cached, in flight or free."""
    kv = scheduler.kv
    held = []
    for node in kv.tree.nodes():
        parent = node.parent
        if not node.on_device and node.host < 0:
            _broken(f"a node at depth {node.depth} is in the tree and in no tier")
        if node.on_device and parent is not None and parent.parent is not None and not parent.on_device:
            _broken(f"block {node.block} is on the device, the one before it is not")
        children = () if node.children is None else node.children.values()
        if node.num_on_device != sum(child.on_device for child in children):
            _broken(f"block {node.block} counts {node.num_on_device} children on the device; it is wrong")
        if node.host >= 0:
            held.append(node.host)
            if not kv.host.in_tree(node.host):
                _broken(f"host block {node.host} is in the tree; the host pool does not know")
    if len(set(held)) != len(held) or len(held) != kv.tree.num_host_blocks:
        _broken(f"{len(held)} nodes hold {len(set(held))} host blocks; the tree counts {kv.tree.num_host_blocks}")
    if kv.host.num_active or kv.host.num_in_flight > kv.num_under_way:
        _broken(f"{kv.host.num_active} host blocks are active, {kv.host.num_in_flight} in flight")
    if kv.host.num_free + kv.host.num_cached + kv.host.num_in_flight != kv.host.num_blocks:
        _broken("the host pool's counts do not add up")


def _check_running(scheduler: Scheduler, sequence: Sequence) -> None:
    """Progress is ordered, blocks cover it, and nothing is published before it is computed."""
    size = scheduler.config.block_size
    if sequence.status is not Status.RUNNING or sequence.node is None:
        _broken(f"{sequence!r} is among the running")
    if not sequence.num_computed <= sequence.num_scheduled <= sequence.num_known:
        _broken(f"{sequence!r}: computed <= scheduled <= known ({sequence.num_known}) does not hold")
    if len(sequence.block_table) * size < sequence.num_scheduled:
        _broken(f"{sequence!r}: {len(sequence.block_table)} blocks do not cover what is scheduled")
    if sequence.num_published * size > sequence.num_computed:
        _broken(f"{sequence!r}: {sequence.num_published} blocks are published before they are computed")
    path = [(node.block, node.key) for node in sequence.node.path()]
    table = [(sequence.block_table[i], sequence.key(i)) for i in range(sequence.num_published)]
    if path != table:
        _broken(f"{sequence!r}: published blocks {table} are not its path in the tree {path}")
    if sequence.num_tokens > sequence.max_length:
        _broken(f"{sequence!r} is longer than {sequence.max_length}")
