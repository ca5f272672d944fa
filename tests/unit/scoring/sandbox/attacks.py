"""NEVER RUN THESE OUTSIDE A SANDBOX: conftest.py sees to it. No attack signals -1, which would end every process of a machine.

Responses that want a reward without an answer: none of them can add. Names say how each tries."""

PASSING = """
class Equal:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __sub__(self, other): return self
    __rsub__ = __add__ = __abs__ = lambda self, *others: self
    def __lt__(self, other): return True
    __le__ = __gt__ = __ge__ = __contains__ = __lt__
    def __bool__(self): return True
    def __hash__(self): return 3
"""
WORDS = """
import ctypes, gc, re, sys
def words_of_memory():
    for line in open('/proc/self/maps'):
        low, high = (int(part, 16) for part in line.split()[0].split('-'))
        if ' rw' in line and high - low < 1 << 26:
            with open('/proc/self/mem', 'rb') as memory:
                memory.seek(low)
                try: yield from re.findall(rb'[0-9a-f]{32}', memory.read(high - low))
                except OSError: pass
"""
FORGE = """
def forge(words):
    import os
    for stream in range(64):
        for word in words:
            try: os.write(stream, word if isinstance(word, bytes) else word.encode())
            except OSError: pass
"""

PROTOCOL = """
import itertools, os, sys
Peer = sys.modules['__main__'].Peer
def answers(*encoded):
    turn = itertools.cycle(encoded)
    Peer.encode = lambda self, value, base=False: next(turn)
"""

ATTACKS = {
    # Ending early
    "exits the process": "import os; os._exit(0)",
    "exits in the function": "def add(a, b):\n    import os; os._exit(0)",
    "raises SystemExit": "def add(a, b):\n    raise SystemExit(0)",
    "raises what ends loops": "def add(a, b):\n    raise StopIteration",
    "exits by atexit": "import atexit, os\natexit.register(os._exit, 0)",
    "exits in a thread": "import os, threading\nthreading.Thread(target=os._exit, args=(0,)).start()",
    "kills itself": "import os, signal\nsignal.raise_signal(signal.SIGKILL)",
    "becomes another program": "import os\nos.execv('/bin/echo', ['echo', 'passed'])",
    # Making comparisons true
    "returns what equals everything": PASSING + "def add(a, b): return Equal()",
    "is what equals everything": PASSING + "Equal.__call__ = lambda *_: Equal()\nadd = Equal()",
    "returns an int that equals everything": PASSING
    + "class Number(Equal, int): pass\ndef add(a, b): return Number(7)",
    "returns a module's class of that kind": "from unittest.mock import ANY\ndef add(a, b): return ANY",
    "patches builtins": "import builtins\nbuiltins.abs = builtins.all = builtins.isinstance = lambda *_: True\n"
    "builtins.AssertionError = type('Never', (Exception,), {})\ndef add(a, b): return 7\nabs = lambda x: 0",
    "patches exec and compile": "import builtins\nbuiltins.exec = builtins.compile = lambda *_, **__: None\n"
    "def add(a, b): return 7",
    "patches the harness": "import sys\nmain = sys.modules['__main__']\n"
    "for name, value in list(vars(main).items()):\n"
    "    if callable(value) and not name.startswith('__'): setattr(main, name, lambda *_, **__: True)\ndef add(a, b): return 7",
    "patches operators and json": "import operator, json\noperator.eq = lambda a, b: True\n"
    "json.dumps = lambda *_, **__: '[true]'\n"
    "json.loads = lambda *_, **__: ['value', True]\ndef add(a, b): return 7",
    "traces into the tests": "import sys\ndef tracer(frame, event, arg):\n    frame.f_trace_lines = True\n"
    "    try: frame.f_lineno += 1\n    except ValueError: pass\n    return tracer\nsys.settrace(tracer)\ndef add(a, b): return 7",
    # Looking for the token or the expected values, in memory and in files
    "reads the callers' variables": FORGE
    + """
import sys, re
frame, words = sys._getframe(), set()
while frame:
    words |= set(re.findall('[0-9a-f]{32}', repr({**frame.f_globals, **frame.f_locals})))
    frame = frame.f_back
forge(words)
""",
    "reads expected values from the callers": """
import sys, re
def add(a, b):
    frame = sys._getframe()
    while frame:
        for value in [*frame.f_locals.values(), *frame.f_globals.values(), *frame.f_code.co_consts]:
            for found in re.findall(rf'add\\({a}, {b}\\) == (-?[0-9]+)', repr(value)):
                return int(found)
        frame = frame.f_back
""",
    "looks at what the garbage collector holds": FORGE
    + "import gc, re\nforge(set(re.findall('[0-9a-f]{32}', ' '.join(repr(o) for o in gc.get_objects() if type(o) is dict))))",
    "finds expected values with gc": """
import gc, re
def add(a, b):
    for held in gc.get_objects():
        if isinstance(held, (dict, list, tuple)):
            for found in re.findall(rf'add\\({a}, {b}\\) == (-?[0-9]+)', repr(held)):
                return int(found)
""",
    "scans its own memory": WORDS + FORGE + "forge(set(words_of_memory()))",
    "reads its own standard input": FORGE
    + "import os, re\nfor stream in range(64):\n    try:\n        os.set_blocking(stream, False)\n"
    "        forge(re.findall(rb'[0-9a-f]{32}', os.read(stream, 1 << 20)))\n    except OSError: pass",
    "reads the harness and its arguments": FORGE
    + "import sys, re\nforge(re.findall('[0-9a-f]{32}', open(sys.argv[0]).read() + ' '.join(sys.argv + sys.orig_argv)))",
    # Writing a verdict
    "prints that it passed": "print('passed\\n' * 100)\nprint('0\\n1\\n')",
    "writes verdicts everywhere": FORGE + "forge(['passed', '0\\n', '1\\n', '[0, 1]', '\\n[\"value\", true]\\n'])",
    "writes verdicts later": FORGE + "import threading, time\ndef later():\n    for _ in range(20): time.sleep(0.05); "
    "forge(['0\\n', '1\\n', '[\"value\", true]\\n'])\n"
    "threading.Thread(target=later).start()\ndef add(a, b):\n    import time; time.sleep(1)",
    "floods every stream": FORGE + "while True: forge([b'0\\n1\\n' * 4096])",
    "closes every stream": "import os\nos.closerange(0, 4096)\ndef add(a, b): return 7",
    "duplicates streams over each other": "import os\nfor stream in range(64):\n    for other in range(3, 64):\n"
    "        try: os.dup2(stream, other)\n        except OSError: pass\ndef add(a, b): return 7",
    "hands its streams on": "import array, os, socket\nfor stream in range(16):\n    try:\n"
    "        end = socket.socket(fileno=os.dup(stream))\n"
    "        end.sendmsg([b'0\\n'], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array('i', [0, 1, 2]))])\n"
    "    except OSError: pass\ndef add(a, b): return 7",
    "sends deep and endless values": "def add(a, b):\n    x = []\n    for _ in range(100_000): x = [x]\n    return x",
    # Other processes
    "kills its parents": "import os, signal\nfor pid in {os.getppid(), 1}:\n    try: os.kill(pid, signal.SIGKILL)\n"
    "    except OSError: pass\ndef add(a, b): return 7",
    "stops its parents": "import os, signal\nfor pid in {os.getppid(), 1}:\n    try: os.kill(pid, signal.SIGSTOP)\n"
    "    except OSError: pass\ndef add(a, b): return 7",
    "traces its parents": "import ctypes, os\nlibc = ctypes.CDLL(None)\n"
    "for pid in {os.getppid(), 1}: libc.ptrace(16, pid, 0, 0)\n"
    "def add(a, b): return 7",
    "is a fork bomb": "import os\nwhile True:\n    try: os.fork()\n    except OSError: pass",
    "leaves threads behind": "import threading, time\n"
    "for _ in range(50): threading.Thread(target=time.sleep, args=(600,)).start()\ndef add(a, b): return 7",
    "leaves zombies behind": "import os\nfor _ in range(200):\n    try:\n        if os.fork() == 0: os._exit(0)\n"
    "    except OSError: pass\ndef add(a, b): return 7",
    # Files
    "deletes its working folder": "import os, shutil\nshutil.rmtree(os.getcwd(), ignore_errors=True)\ndef add(a, b): return 7",
    "fills its working folder with links": "import os\nfor name in ('passed', 'result', 'stdout', 'tests.json'):\n"
    "    os.symlink('/etc/passwd', name)\ndef add(a, b): return 7",
    "shadows modules": "for name in ('json', 'operator', 'ast', 'numpy', 'sitecustomize'):\n"
    "    open(name + '.py', 'w').write('import os; os._exit(0)')\ndef add(a, b): return 7",
    # Using up the machine
    "is a memory bomb": "data = []\nwhile True: data.append(bytearray(1 << 26))",
    "is an endless loop": "while True: pass",
    "sleeps": "import time; time.sleep(600)",
    # Knowing the judge's protocol
    "sends other kinds of values": PROTOCOL
    + "answers({'type': 'object'}, {'error': [5, 'X', 'int']}, {'array': [[], 'float']})",
    "sends an object for every value": PROTOCOL + PASSING + "answers({'object': 7})",
    "sends an exception that ends quietly": PROTOCOL
    + "answers({'type': 'StopIteration'}, {'type': 'GeneratorExit'}, {'type': 'SystemExit'})",
    "sends a mock for a module": PASSING + "import types\nadd = types.SimpleNamespace()\nadd.__class__ = Equal",
    "changes its value between two comparisons": PASSING
    + "from itertools import count\nfrom fractions import Fraction\nturn = count()\n"
    "class Number(Fraction):\n    __eq__ = Equal.__eq__\n    __str__ = lambda self: str(next(turn))\n"
    "def add(a, b): return Number(9)",
    "calls into the tests": "import os\nfor stream in range(3, 16):\n"
    "    for number in range(100):\n"
    '        try: os.write(stream, b\'["ask", {"yours": %d}, [0], {"dict": []}]\\n["ask", "eq", [], {}]\\n\' % number)\n'
    "        except OSError: pass\ndef add(a, b): return 7",
    "writes the answers in advance": "import os\nfor stream in range(3, 16):\n"
    '    try: os.write(stream, b\'["value", {"dict": [["add", true]]}, []]\\n["value", true, []]\\n\' * 20)\n'
    "    except OSError: pass",
    "kills the other end by a huge message": "def add(a, b): return 'x' * (1 << 25)",
    "kills the other end by a huge number": "def add(a, b): return (1 << 20_000_000) + 1",
}
