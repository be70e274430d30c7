"""What dictionaries, lists and tuples hold."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from typing import Any

from fastserial.nests import rebuilt, shown, walk

Pair = namedtuple("Pair", "first second")


class Scheduler(dict[str, Any]):
    """A dictionary with a state of its own."""

    def state_dict(self) -> dict[str, Any]:
        return dict(self)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.update(state)


def paths(nest: Any, **how: bool) -> list[str]:
    return [shown(path) for path, _ in walk(nest, **how)]


def test_containers_come_before_what_they_hold_and_numbers_do_not() -> None:
    one, other = object(), object()
    nest = {"a": [one, 3, {"b": other}], "text": "x", "c": (1, 2.5)}
    assert paths(nest) == ["", "a", "a[0]", "a[2]", "a[2]['b']", "c"]
    assert shown(("b",), "before.state") == "before.state['b']"


def test_what_is_in_two_places_and_in_itself() -> None:
    both = [object()]
    nest: list[Any] = [both, both]
    nest.append(nest)
    assert paths(nest) == ["", "0", "0[0]", "1", "1[0]", "2"]
    assert paths(nest, once=True) == ["", "0", "0[0]", "1", "2"]


def test_what_has_a_state_of_its_own_is_not_looked_into() -> None:
    nest = [Scheduler(a=object())]
    assert paths(nest) == ["", "0"]
    assert paths(nest, objects=True) == ["", "0", "0['a']"]


def test_a_container_with_other_items_keeps_its_type_and_keys() -> None:
    ordered = OrderedDict(b=1, a=2)
    for container, expected in (
        (ordered, OrderedDict(b=10, a=20)),
        ([1, 2], [10, 20]),
        ((1, 2), (10, 20)),
        (Pair(1, 2), Pair(10, 20)),
    ):
        found = rebuilt(container, lambda item: 10 * item)
        assert found == expected
        assert type(found) is type(expected)
    assert ordered == OrderedDict(b=1, a=2)
