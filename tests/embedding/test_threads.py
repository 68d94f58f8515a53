"""Forward passes of one collection from several threads."""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import distcache
from distcache.errors import PlanError

ROWS, DIM, THREADS, BATCHES = 3000, 4, 4, 40


def run_in_threads(work: Callable[[int], Any]) -> list[Any]:
    """Return what `work(number)` returned, or the exception that it raised, for each thread."""
    results: list[Any] = [None] * THREADS

    def run(number: int) -> None:
        try:
            results[number] = work(number)
        except BaseException as error:
            results[number] = error

    threads = [threading.Thread(target=run, args=(number,)) for number in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def make(ratio: float = 0.1) -> distcache.CachedEmbeddingBag:
    weight = torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(1))
    return distcache.CachedEmbeddingBag(
        ROWS,
        DIM,
        mode="sum",
        _weight=weight.clone(),
        device="cpu",
        ratio=ratio,
        optimizer=distcache.optim.SGD(lr=0.5),
    )


def table() -> Tensor:
    return torch.randn(ROWS, DIM, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("ratio", [0.1, 1.0])
@pytest.mark.parametrize("gradients", [False, True])
def test_evaluation_in_several_threads_reads_the_right_rows(ratio: float, gradients: bool) -> None:
    bag, weight = make(ratio).eval(), table()  # the threads also make its tables

    def evaluate(number: int) -> int:
        generator = torch.Generator().manual_seed(number)
        right = 0
        for _ in range(BATCHES):
            ids = torch.randint(0, ROWS, (8, 3), generator=generator)
            with torch.set_grad_enabled(gradients):
                pooled = bag(ids)
            right += bool(torch.allclose(pooled, weight[ids].sum(1), atol=1e-5))
        return right

    assert run_in_threads(evaluate) == [BATCHES] * THREADS
    bag.close()


def test_a_sequence_collection_and_a_copy_are_evaluated_beside_each_other() -> None:
    weight = table()
    embedding = distcache.CachedEmbedding(ROWS, DIM, _weight=table(), device="cpu", ratio=0.1)
    embedding.eval()
    modules = [embedding, copy.deepcopy(embedding)]

    def evaluate(number: int) -> int:
        generator = torch.Generator().manual_seed(number)
        right = 0
        for _ in range(BATCHES):
            ids = torch.randint(0, ROWS, (20,), generator=generator)
            with torch.no_grad():
                right += bool(torch.equal(modules[number % 2](ids), weight[ids]))
        return right

    assert run_in_threads(evaluate) == [BATCHES] * THREADS
    embedding.close()


def test_training_in_a_second_thread_is_refused_until_the_step_has_ended() -> None:
    bag = make()
    ids = torch.tensor([[1, 2], [3, 4]])
    loss = bag(ids).sum()
    errors: list[Any] = []

    def train() -> None:
        try:
            bag(ids + 10).sum().backward()
            bag.step()
            errors.append(None)
        except PlanError as error:
            errors.append(str(error))

    def run() -> None:
        thread = threading.Thread(target=train, name="second")
        thread.start()
        thread.join()

    run()
    assert "in thread second while another thread has a step of it open" in errors[0]
    assert "train from one thread" in errors[0]
    loss.backward()
    bag.step()
    run()
    assert errors[1] is None
    expected = table()
    for row in (1, 2, 3, 4, 11, 12, 13, 14):
        expected[row] -= 0.5
    assert torch.equal(bag.state_dict()["weight"], expected)
    bag.close()


def test_training_while_another_thread_is_in_a_forward_is_refused() -> None:
    inside, leave = threading.Event(), threading.Event()

    class SlowIds(torch.Tensor):
        """Ids whose copy to the CPU waits, so that a forward pass takes long."""

        @classmethod
        def __torch_function__(cls, function, types, args=(), kwargs=None):
            if function is torch.Tensor.reshape:
                inside.set()
                assert leave.wait(30)
            return super().__torch_function__(function, types, args, kwargs or {})

    bag = make()
    bag(torch.tensor([[0]]))
    bag.optimizer.zero_grad()
    ids = torch.tensor([[5, 6]])
    pooled: list[Tensor] = []

    def evaluate() -> None:
        with torch.no_grad():
            pooled.append(bag(ids.as_subclass(SlowIds)))

    thread = threading.Thread(target=evaluate)
    thread.start()
    assert inside.wait(30)
    try:
        with pytest.raises(PlanError, match="another thread is in a forward pass of it"):
            bag(torch.tensor([[7]]))
    finally:
        leave.set()
        thread.join()
    assert torch.allclose(pooled[0].as_subclass(Tensor), table()[ids].sum(1))
    bag.close()
