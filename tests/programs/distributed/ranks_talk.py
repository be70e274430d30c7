"""A rank: messages to rank 0 and back of the given lengths, with signs of life in between."""

from __future__ import annotations

import sys

from support.ranks import join

from fastserial.distributed.ranks.group import traffic_of


def message(rank: int, length: int) -> bytes:
    return bytes((rank + index * 7) % 251 for index in range(length))


def main() -> None:
    rank, count = join()
    lengths = [int(text) for text in sys.argv[1:]]
    traffic = traffic_of(None, 60)
    for turn, length in enumerate(lengths):
        answer = lengths[-1 - turn]

        def decide(messages: list[bytes], length: int = length, answer: int = answer) -> bytes:
            assert messages == [message(other, length) for other in range(count)], length
            return message(9, answer)

        for _ in range(turn % 3):
            traffic._last_beat = -1000.0  # so that it is time for one
            traffic.alive()
        assert traffic.consult(message(rank, length), decide) == message(9, answer), length
    print(len(lengths))


main()
