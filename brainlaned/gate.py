"""The gates: when a route may be asked again.

A gate is a row, so it survives a restart, and it belongs to one route, so no job waits for the gate of another. It is
closed by what a brain (or the way to it) said, and opened by a real answer or by the operator, never by a health check
that is green. A gate that only the operator opens has no time of its next probe. Waiting behind a gate uses up nothing.
"""

import random
from collections.abc import Callable, Mapping
from datetime import timedelta

from . import config, states, wire
from .db import Transaction

JITTER = 0.2
"""A growing wait is lengthened by up to this part, so that many lanes do not knock together; never shortened."""


class Gates:
    """The gates of a lane's routes."""

    def __init__(
        self, routes: Mapping[str, config.Route], jitter: Callable[[float, float], float] = random.uniform
    ) -> None:
        self._routes = routes
        self._jitter = jitter

    def open_routes(self, tx: Transaction) -> list[config.OpenRoute]:
        """Return the routes that may be asked now: those with an open gate, and those whose time to probe has come."""
        rows = tx.execute(
            """
            select route, closed_at from gates
            where configured = 1 and (closed_at is null or next_probe_at <= :now)
            order by route
            """,
            {"now": tx.now},
        )
        return [
            config.OpenRoute(self._routes[row["route"]], is_probe=row["closed_at"] is not None)
            for row in rows
            if row["route"] in self._routes
        ]

    def close(self, tx: Transaction, route: str, closing: states.Closing) -> str | None:
        """Close a route's gate, or keep it closed for longer. Return the time of the next probe."""
        refusals = tx.execute("select refusals from gates where route = :route", {"route": route}).fetchone()
        if refusals is None:
            return None
        next_probe = None
        if not closing.operator_only:
            if closing.wait_s is None:
                wait_s = self._growing_wait_s(route, refusals[0])
            else:
                # No sooner than the brain said; and a wait of nothing must not be asked in a circle.
                wait_s = max(closing.wait_s, self._first_wait_s(route))
            next_probe = wire.format_time(tx.moment + timedelta(seconds=wait_s))
        tx.execute(
            """
            update gates set closed_at = coalesce(closed_at, :now), reason = :reason, detail = :detail,
                next_probe_at = :next_probe, refusals = refusals + 1
            where route = :route
            """,
            {
                "route": route,
                "now": tx.now,
                "reason": closing.reason,
                "detail": closing.detail,
                "next_probe": next_probe,
            },
        )
        return next_probe

    def open(self, tx: Transaction, route: str) -> bool:
        """Open a route's gate. Return whether it was closed."""
        cursor = tx.execute(
            """
            update gates set closed_at = null, reason = null, detail = null, next_probe_at = null, refusals = 0
            where route = :route and closed_at is not null
            """,
            {"route": route},
        )
        return cursor.rowcount == 1

    def _first_wait_s(self, name: str) -> float:
        route = self._routes.get(name)
        return route.retry_first_s if route else 2.0

    def _growing_wait_s(self, name: str, refusals: int) -> float:
        route = self._routes.get(name)
        first_s, cap_s = (route.retry_first_s, route.retry_cap_s) if route else (2.0, 600.0)
        return float(min(cap_s, first_s * 2.0 ** min(refusals, 40))) * self._jitter(1.0, 1.0 + JITTER)
