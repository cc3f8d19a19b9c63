"""The verbs of a request's life: bind, finish, checkpoint, fork, capacity."""

from kvpool import KVCacheExhaustedError, UnknownRequestError

MAX_HISTORY = 16  # finished sequences that later prompts continue
MAX_BOUND = 24  # then a bind finishes one first: no engine runs more than it can


class RequestVerbs:
    # ---- binds

    def started(self, choose, plan, request_id, key, priority, prompt, was_empty):
        request = self.model.bind(
            plan, request_id, self.page_ids(request_id), key, priority, prompt
        )
        tokens = list(prompt or [])
        self.model.start_tokens(
            request, tokens + self.draw_tokens(choose, request.capacity - len(tokens))
        )
        if was_empty:
            self.adopt_step((request_id,))
        return request

    def bind(self, choose):
        """A strict bind; answers its request, or None where it was refused."""
        if len(self.model.requests) >= MAX_BOUND:
            return self.finish(choose)
        prompt, capacity, key = self.draw_bind(choose)
        priority = choose.item((0, 0, 0, 1, 5, -2))
        given = self.given(choose, prompt)
        plan = self.model.plan_bind(prompt, capacity, key)
        if not plan.fits:
            with self.refused(KVCacheExhaustedError):
                self.pool.bind_request(given, capacity, extra_key=key, priority=priority)
            error = self.caught
            assert error.needed_pages == plan.need
            assert error.free_pages == len(self.model.free)
            assert error.total_pages == self.model.num_pages
            assert error.can_ever_fit == (plan.num_pages <= self.model.num_pages)
            return None
        was_empty = not self.model.requests
        request_id = self.pool.bind_request(given, capacity, extra_key=key, priority=priority)
        return self.started(choose, plan, request_id, key, priority, prompt, was_empty)

    def serve(self, choose):
        """A whole life in one go: bind, prefill, some decoding, finish."""
        request = self.bind(choose)
        if request is not None:
            end = choose.integer(len(request.prompt), request.capacity)
            self.pool.activate_step(request.id)
            self.adopt_step((request.id,))
            self.write_rows(self.latest.step, [(request, request.valid_len, end)])
            self.finish_with(choose, request, request.tokens[:end])

    def would_fit(self, choose):
        prompt, capacity, key = self.draw_bind(choose)
        before = self.snapshot()
        fits = self.pool.would_fit(self.given(choose, prompt), capacity, extra_key=key)
        assert fits is self.model.plan_bind(prompt, capacity, key).fits
        assert self.snapshot() == before

    def bind_with_prefix(self, choose):
        prompt, capacity, key = self.draw_bind(choose)
        plan = self.model.plan_exclusive(prompt, capacity, key)
        given = self.given(choose, prompt)
        if not plan.fits:
            if self.model.reuse:  # with reuse off it clamps like bind_requests, or says no
                with self.refused(ValueError):
                    self.pool.bind_with_prefix(given, capacity, extra_key=key)
            return
        self.model.release_all()
        matched = self.pool.bind_with_prefix(given, capacity, extra_key=key)
        assert matched == len(plan.path) * self.page_size
        ids = tuple(self.pool.step.request_ids)
        self.started(choose, plan, ids[0], key, 0, prompt, True)

    def bind_requests(self, choose):
        batch = choose.integer(1, 4)
        capacity = choose.integer(1, 6 * self.page_size)
        per_request = self.model.plan_batch(batch, capacity)
        if per_request < 1:
            with self.refused(KVCacheExhaustedError):
                self.pool.bind_requests(batch, capacity)
            return
        self.model.release_all()
        ids = self.pool.bind_requests(batch, capacity)
        assert len(ids) == batch
        # all pages are claimed by one call: evict for all before the first one is followed
        self.model.make_room(batch * per_request)
        for request_id in ids:
            plan = self.model.plan_bind([], per_request * self.page_size, None)
            self.started(choose, plan, request_id, None, 0, None, False)
        self.adopt_step(ids)

    def continued(self, choose, request, tokens):
        """`tokens`, what is left of the prompt, and any others up to the capacity."""
        tokens = tokens + (request.prompt or [])[len(tokens) :]
        tokens = tokens + self.draw_tokens(choose, max(0, request.capacity - len(tokens)))
        return tokens[: request.capacity]

    # ---- the end of a request

    def draw_sequence(self, choose, request):
        """Tokens for finish or checkpoint: all written, the sampled one too, or fewer."""
        written = request.valid_len
        longer = min(request.capacity, written + choose.integer(0, 3))
        n = choose.item((written, longer, choose.integer(0, written), len(request.prompt or [])))
        return request.tokens[: min(n, request.capacity)]

    def finish(self, choose):
        request = self.draw_request(choose)
        if request is None:
            return
        tokens = self.draw_sequence(choose, request)
        if tokens and request.prompt and request.matched is not None and choose.integer(0, 5) == 0:
            wrong = [tokens[0] ^ 1, *tokens[1:]]
            with self.refused(ValueError):
                self.pool.finish_request(request.id, wrong)
        self.finish_with(choose, request, tokens)

    def finish_with(self, choose, request, tokens):
        given = self.given(choose, tokens)
        if len(self.model.requests) == 1 and choose.integer(0, 1):
            count = self.pool.finish_active(given)
        else:
            count = self.pool.finish_request(request.id, given)
        self.history = [*self.history[-MAX_HISTORY:], tokens]
        assert count == self.model.finish(request, tokens)

    def checkpoint(self, choose):
        request = self.draw_request(choose)
        if request is not None:
            tokens = self.draw_sequence(choose, request)
            count = self.pool.checkpoint_request(request.id, self.given(choose, tokens))
            assert count == self.model.checkpoint(request, tokens)

    def unbind(self, choose):
        request = self.draw_request(choose)
        if request is not None:
            self.pool.unbind_request(request.id)
            self.model.release(request)
            assert not self.pool.is_bound(request.id)
            with self.refused(UnknownRequestError):
                self.pool.unbind_request(request.id)

    def unbind_all(self, _choose):
        self.pool.unbind_requests()
        self.model.release_all()

    # ---- forks and capacity

    def fork(self, choose):
        parent = self.draw_request(choose)
        if parent is None:
            return
        capacity = max(1, parent.valid_len) + choose.integer(0, 3 * self.page_size)
        plan = self.model.plan_fork(parent, capacity)
        if not plan[2]:
            with self.refused(KVCacheExhaustedError):
                self.pool.fork_request(parent.id, capacity)
            assert self.caught.needed_pages == plan[1]
            return
        child_id = self.pool.fork_request(parent.id, capacity)
        child = self.model.fork(parent, child_id, self.page_ids(child_id), plan)
        child.set_tokens(self.continued(choose, child, parent.tokens[: parent.valid_len]))

    def extend(self, choose):
        request = self.draw_request(choose)
        if request is None:
            return
        capacity = request.capacity + choose.integer(0, 3 * self.page_size)
        self.pool.extend_request(
            request.id, choose.integer(1, request.capacity)
        )  # less: no change
        need = self.model.pages_for(capacity) - len(request.pages)
        if not self.model.fits(need):
            with self.refused(KVCacheExhaustedError):
                self.pool.extend_request(request.id, capacity)
            assert self.caught.needed_pages == need
            return
        self.pool.extend_request(request.id, capacity)
        fresh = self.model.extend(request, self.page_ids(request.id))
        assert len(fresh) == need
        request.grow(fresh)
        request.set_tokens(self.continued(choose, request, request.tokens))

    def shrink(self, choose):
        request = self.draw_request(choose)
        if request is None:
            return
        capacity = choose.integer(1, request.capacity)
        self.pool.shrink_request(request.id, capacity)
        self.model.shrink(request, capacity)
        for twin in self.steps:  # a table must not outlive the pages that it names
            if request.id in twin.ids and self.alive(twin):
                twin.step.clear_page_table()
                twin.lengths = None
