"""Tests of honest code pass as if code and tests ran in one interpreter."""

import pytest

from nemo_style_rlhf.scoring.code_judge import passed_tests

CODE = """
import collections, dataclasses, enum, typing
import numpy as np
from fractions import Fraction

def add(a, b): return a + b
def same(x): return x
def sort_in_place(items): items.sort()
def rotate(matrix): matrix[:] = [list(row) for row in zip(*matrix[::-1])]
def drop(mapping, seen): mapping.clear(); seen.add(3)
def apply(function, items): return [function(item) for item in items]
def refuse(x): raise ValueError(f'not {x}')
class Broke(Exception): pass
def broke(): raise Broke('no money')
def count_to(n): yield from range(n)
def adder(n): return lambda x: x + n
def fast(n): return np.arange(n)
def mean(values): return np.mean(values)
def sum(a, b): return a + b
def half(): return Fraction(1, 2)
def counted(text): return collections.Counter(text)
def divide(a, b): return a / b

class Stack:
    size = 2
    def __init__(self): self.items = []
    def push(self, item, *, twice=False): self.items += [item] * (2 if twice else 1)
    def pop(self): return self.items.pop()
    def __len__(self): return len(self.items)
    def __getitem__(self, index): return self.items[index]
    def __str__(self): return f'Stack of {len(self)}'
    @staticmethod
    def name(): return 'stack'

@dataclasses.dataclass(order=True)
class Point:
    x: int
    y: int
    def __add__(self, other): return Point(self.x + other.x, self.y + other.y)

class Pair(typing.NamedTuple):
    left: int
    right: int

class Names(list):
    def first(self): return self[0]

class Color(enum.IntEnum):
    RED = 1

class Node:
    def __init__(self, value, next=None): self.value, self.next = value, next

def values(node):
    return [node.value] + (values(node.next) if node.next else [])

class Solution:
    def twoSum(self, nums, target):
        return next([i, j] for i in range(len(nums)) for j in range(i) if nums[i] + nums[j] == target)
"""

PASS = [
    "assert add(1, 2) == 3 and add('a', 'b') == 'ab' and add([1], [2]) == [1, 2]",
    "for x in (None, True, 0, -1.5, 2 + 1j, 'é\\n', b'x', (), (1,), {1, 2}, frozenset({1}), {(1, 2): [3]}, 10 ** 6000):\n"
    "    assert same(x) == x and type(same(x)) is type(x), x",
    "assert same(float('inf')) > 1 and same(float('nan')) != same(float('nan'))",
    "from datetime import date, datetime\nassert same(date(2020, 1, 2)) == date(2020, 1, 2)",
    "from collections import deque\nassert same(deque([1, 2])) == deque([1, 2])",
    "from fractions import Fraction\nassert half() == Fraction(1, 2)",
    "x = [3, 1, 2]\nsort_in_place(x)\nassert x == [1, 2, 3]",
    "m = [[1, 2], [3, 4]]\nrotate(m)\nassert m == [[3, 1], [4, 2]]",
    "d, s = {1: 2}, {1}\ndrop(d, s)\nassert d == {} and s == {1, 3}",
    "assert apply(lambda x: x + 1, [1, 2]) == [2, 3] and apply(str, [1]) == ['1'] and apply(len, ['ab']) == [2]",
    "try:\n    refuse(3)\nexcept ValueError as error:\n    assert str(error) == 'not 3'\nelse:\n    assert False",
    "try:\n    broke()\n    assert False\nexcept Broke as error:\n    assert 'money' in str(error)",
    "try:\n    divide(1, 0)\n    assert False\nexcept ZeroDivisionError:\n    pass",
    "assert list(count_to(3)) == [0, 1, 2] and next(count_to(2)) == 0 and sorted(count_to(2)) == [0, 1]",
    "assert adder(2)(3) == 5 and callable(adder(1))",
    "assert list(fast(3)) == [0, 1, 2] and (fast(2) == np.array([0, 1])).all() and np.allclose(fast(2), [0, 1])",
    "import numpy\nassert mean([1, 2]) == 1.5 and abs(mean([1, 2]) - 1.5) < 1e-9",
    "assert sum(10, 15) == 25",
    "assert counted('aab') == {'a': 2, 'b': 1}",
    "s = Stack()\ns.push(1)\ns.push(2, twice=True)\nassert len(s) == 3 and s.pop() == 2 and s[0] == 1 and s.items == [1, 2]\n"
    "assert isinstance(s, Stack) and not isinstance(3, Stack) and str(s) == 'Stack of 2' and 2 in s and 5 not in s\n"
    "assert Stack.size == 2 and Stack.name() == 'stack' and list(s) == [1, 2] and hasattr(s, 'push') and not hasattr(s, 'x')",
    "assert Point(1, 2) == Point(1, 2) and Point(1, 2) != Point(1, 3) and Point(1, 2) + Point(1, 1) == Point(2, 3)\n"
    "assert sorted([Point(2, 1), Point(1, 5)])[0].x == 1 and repr(Point(1, 2)) == 'Point(x=1, y=2)'",
    "assert Pair(1, 2) == (1, 2) and Pair(1, 2).left == 1 and Color.RED == 1 and [Pair(1, 2)] == [(1, 2)]",
    "n = Names(['a'])\nn.append('b')\nassert n == ['a', 'b'] and n.first() == 'a' and len(n) == 2",
    "n = Node(1, Node(2))\nn.next.next = Node(3)\nassert values(n) == [1, 2, 3]",
    "assert Solution().twoSum([2, 7, 11], 9) == [1, 0]",
    "def check(candidate):\n    assert candidate(1, 2) == 3\n    assert abs(candidate(.1, .2) - .3) < 1e-9\ncheck(add)",
    "assert all(add(i, 1) == i + 1 for i in range(5)) and [add(i, i) for i in range(2)] == [0, 2]",
    "import random\nfor _ in range(20):\n    a, b = random.random(), random.random()\n    assert add(a, b) == a + b",
]

FAIL = [
    "assert add(1, 2) == 4",
    "assert Stack() == []",
    "assert Pair(1, 2) == (1, 3)",
    "assert missing(1)",
    "raise SystemExit",
    "assert add(1, 'x')",
    "x = [3, 1]\nsort_in_place(x)\nassert x == [3, 1]",
    "refuse(1)",
    "assert fast(3).sum() == 4",
    "assert len(Stack()) == 1",
    "def add(",
]


@pytest.fixture(scope="module")
def passed():
    return passed_tests(CODE, PASS + FAIL, wall_s=60.0)


@pytest.mark.parametrize("number", range(len(PASS)), ids=lambda number: PASS[number][:40])
def test_what_passes_in_one_interpreter_passes(passed, number):
    names: dict[str, object] = {"__name__": "answer"}
    exec(CODE + PASS[number], names)
    assert number in passed


@pytest.mark.parametrize("number", range(len(FAIL)), ids=lambda number: FAIL[number][:40])
def test_what_fails_in_one_interpreter_fails(passed, number):
    assert len(PASS) + number not in passed
