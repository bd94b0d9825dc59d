"""Calls that wait are made together, in one thread."""

import asyncio
import concurrent.futures


class Together:
    """Makes waiting calls of coroutines one call of `run` in a thread, for at most so many."""

    def __init__(self, run, most):
        self.run, self.most, self.waiting, self.task = run, most, [], None
        self.thread = concurrent.futures.ThreadPoolExecutor(1)

    async def __call__(self, job):
        loop = asyncio.get_running_loop()
        self.waiting.append(entry := (job, future := loop.create_future()))
        if self.task is None or self.task.done():
            self.task = loop.create_task(self.work(loop))
        try:
            return await future
        finally:
            self.waiting = [x for x in self.waiting if x is not entry]  # nobody waits any more

    async def work(self, loop):
        while self.waiting:
            chosen, self.waiting = self.waiting[: self.most], self.waiting[self.most :]
            try:
                results = await loop.run_in_executor(self.thread, self.run, [job for job, _ in chosen])
            except Exception as error:
                results = [error] * len(chosen)
            for (_, future), result in zip(chosen, results, strict=True):
                if not future.done():
                    (future.set_exception if isinstance(result, Exception) else future.set_result)(result)
