"""The program that tests an answer's code, inside a sandbox. unit_tests.py sends this file's text there, and reads its
output.

Tests and answer never share a process; otherwise the answer could claim that it passed:

    examiner --- calls: name, arguments ---> examinee: one for each test, forked from a process that never knew more
    knows the tests <-- results, as data --- knows the answer's code

Only data crosses: numbers, strings, and containers of them. They are rebuilt as Python's own types, so that no `__eq__`
of the answer decides a comparison. The examiner holds a name for any other object, which stays with the examinee. The
verdict begins with a token that came by stdin, to a process whose memory no other can read.
"""

import ast
import builtins
import collections
import contextlib
import ctypes
import importlib
import json
import os
import signal
import socket
import sys
import types

MOST_CHARACTERS = 500
"""The longest message that is kept."""
PR_SET_DUMPABLE = 4
ADDRESS = "examiner"
"""A socket in the working directory. A connection to it is always treated as the answer's, so a false one gains
nothing."""
CONNECT_S = 20.0


class TimeUp(BaseException):
    """A test took too long. Not an Exception, so that the test's `except` clauses do not catch it."""


class AnswerEndedError(Exception):
    """The examinee ended during a call."""


class JsonConnection:
    """One end of a connection, which carries a JSON message a line."""

    def __init__(self, connection):
        self._connection, self._file = connection, connection.makefile("rb")

    def send(self, message):
        self._connection.sendall(json.dumps(message).encode() + b"\n")

    def receive(self):
        line = self._file.readline()
        if not line.endswith(b"\n"):
            raise AnswerEndedError("the answer ended its process")
        return json.loads(line)

    def close(self):
        self._file.close()
        self._connection.close()


SCALARS = {int: int.__int__, float: float.__float__, str: str.__str__}
"""Converts an instance of the answer's own subclass of one of these types to the type itself."""
SEQUENCES = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset, "deque": collections.deque}


def encode(value, opaque):
    """The value as JSON data. opaque: maps any other object to a number."""
    if value is None or type(value) is bool:
        return value
    for base, plain in SCALARS.items():
        if isinstance(value, base):
            return plain(value)
    if getattr(value, "shape", None) == () and hasattr(value, "tolist"):  # a number of NumPy's
        return encode(value.tolist(), opaque)
    for name, base in SEQUENCES.items():
        if isinstance(value, base):
            return [name, [encode(item, opaque) for item in base.__iter__(value)]]
    if isinstance(value, dict):
        return ["dict", [[encode(key, opaque), encode(item, opaque)] for key, item in dict.items(value)]]
    if isinstance(value, (bytes, bytearray)):
        return [type(value).__name__, bytes(value).hex()]
    if isinstance(value, complex):
        return ["complex", [value.real, value.imag]]
    if isinstance(value, range):
        return ["range", [value.start, value.stop, value.step]]
    if hasattr(value, "__next__"):
        return ["iterator", [encode(item, opaque) for item in value]]
    return ["opaque", opaque(value)]


def decode(data, opaque):
    """The value that `encode` was given, in Python's own types. opaque: maps a number to its object."""
    if not isinstance(data, list):
        return data
    kind, content = data
    if kind in SEQUENCES:
        return SEQUENCES[kind](decode(item, opaque) for item in content)
    if kind == "dict":
        return {decode(key, opaque): decode(item, opaque) for key, item in content}
    if kind in ("bytes", "bytearray"):
        return getattr(builtins, kind).fromhex(content)
    if kind in ("complex", "range"):
        return getattr(builtins, kind)(*content)
    if kind == "iterator":
        return iter([decode(item, opaque) for item in content])
    if kind == "opaque":
        return opaque(content)
    raise ValueError(f"the answer's process sent {kind!r:.50}")


# --- the examinee ---------------------------------------------------------------------------------------------------


def make_examinees(control):
    """Fork an examinee for each message that arrives on `control`, and report its process id.

    The examinee connects by itself: the kernel counts descriptors in flight for each user, so a program in another
    sandbox could use up the limit."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # no process waits for examinees
    while True:
        try:
            control.receive()
        except AnswerEndedError:  # the examiner has ended
            os._exit(0)
        pid = os.fork()
        if pid == 0:
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            os.setsid()
            control.close()
            with contextlib.suppress(OSError):
                connection = socket.socket(socket.AF_UNIX)
                connection.connect(ADDRESS)
                examinee(JsonConnection(connection))
            os._exit(0)
        control.send(pid)


def examinee(connection):
    """Load the answer's code, then do as told until the connection is closed."""
    module = sys.modules["answer"] = types.ModuleType("answer")
    objects = [module]

    def keep(value):
        objects.append(value)
        return len(objects) - 1

    while True:
        what, *message = connection.receive()
        try:
            reply = do(what, message, module, objects, keep)
        except BaseException as error:  # noqa: BLE001 - the answer's code raised it, SystemExit too
            reply = {"error": type(error).__name__, "text": f"{error}"[:MOST_CHARACTERS]}
        connection.send(reply)


def do(what, message, module, objects, keep):
    if what == "load":
        exec(compile(message[0], "<answer>", "exec"), module.__dict__)
        return {"value": None}
    number, name, arguments, named = message
    target = objects[number]
    if what == "get":
        return {"value": encode(getattr(target, name), keep)}
    if what == "set":
        setattr(target, name, decode(arguments[0], objects.__getitem__))
        return {"value": None}
    arguments = [decode(argument, objects.__getitem__) for argument in arguments]
    named = {key: decode(argument, objects.__getitem__) for key, argument in named.items()}
    value = encode(target(*arguments, **named), keep)
    return {"value": value, "arguments": [encode(argument, keep) for argument in arguments]}


# --- the examiner ---------------------------------------------------------------------------------------------------


class Examinee:
    """The examiner's side of an examinee."""

    def __init__(self, control, listener):
        control.send("another")
        self.pid = control.receive()
        self.connection = JsonConnection(listener.accept()[0])
        self.last = ""

    def ask(self, *message):
        try:
            self.connection.send(message)
            reply = self.connection.receive()
        except OSError:
            raise AnswerEndedError("the answer ended its process") from None
        if "error" not in reply:
            return reply
        kind = getattr(builtins, str(reply["error"]), None)
        if kind in (StopIteration, StopAsyncIteration):  # all(map(f, xs)) would read this as the end of xs
            kind = None
        raised = RuntimeError(f"{reply['error']}: {reply['text']}")
        if isinstance(kind, type) and issubclass(kind, Exception):
            with contextlib.suppress(TypeError):  # it takes other arguments
                raised = kind(reply["text"])
        raise raised

    def get(self, number, name):
        return self.decoded(self.ask("get", number, name, [], {})["value"])

    def decoded(self, data):
        return decode(data, lambda number: Opaque(self, int(number)))

    def end(self):
        self.connection.close()
        for kill in (os.killpg, os.kill):  # it may not lead its group yet
            with contextlib.suppress(ProcessLookupError):
                kill(self.pid, signal.SIGKILL)


class Opaque:
    """An object that stays in the examinee. It equals only itself."""

    __slots__ = ("_examinee", "_number")

    def __init__(self, examinee, number):
        object.__setattr__(self, "_examinee", examinee)
        object.__setattr__(self, "_number", number)

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return self._examinee.get(self._number, name)

    def __setattr__(self, name, value):
        self._examinee.ask("set", self._number, name, [encode(value, number_of)], {})

    def __call__(self, *arguments, **named):
        encoded = [encode(argument, number_of) for argument in arguments]
        named = {key: encode(argument, number_of) for key, argument in named.items()}
        reply = self._examinee.ask("call", self._number, "", encoded, named)
        for argument, after in zip(arguments, reply["arguments"], strict=True):
            changed(argument, self._examinee.decoded(after))
        value = self._examinee.decoded(reply["value"])
        self._examinee.last = f", where the last call gave {value!r}"
        return value


def number_of(value):
    if isinstance(value, Opaque):
        return value._number
    raise TypeError(f"a test hands the answer a {type(value).__name__}, which is not data")


def changed(argument, after):
    """Repeat on the examiner's argument the change that a call made to its copy."""
    if type(argument) is not type(after) or argument == after:
        return
    if isinstance(argument, (list, bytearray)):
        argument[:] = after
    elif isinstance(argument, (dict, set)):
        argument.clear()
        argument.update(after)


def names_of(source):
    """The names that code uses but does not define; and those among them that it uses as modules."""
    nodes = list(ast.walk(ast.parse(source)))
    names = [node for node in nodes if isinstance(node, ast.Name)]
    stored = {node.id for node in names if not isinstance(node.ctx, ast.Load)}
    bases = {node.value.id for node in nodes if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name)}
    used = {node.id for node in names} - stored - set(dir(builtins))
    return used, used & bases & sys.stdlib_module_names


def take(test, task, examinee):
    examinee.ask("load", task["answer"])
    namespace: dict[str, object] = {"__name__": "tests"}
    exec(compile(task["prompt"], "<prompt>", "exec"), namespace)
    if task["entry_point"]:
        namespace["candidate"] = namespace[task["entry_point"]] = examinee.get(0, task["entry_point"])
    code = f"{task['setup']}\n{test}"
    used, modules = names_of(code)
    for name in used - set(namespace):
        if name in modules:  # the answer's own `math` could call any two numbers close
            namespace[name] = importlib.import_module(name)
            continue
        with contextlib.suppress(AttributeError):  # it is missing; the test will fail
            namespace[name] = examinee.get(0, name)
    exec(compile(code, "<test>", "exec"), namespace)


def examine(test, task, control, listener):
    """Why one test failed, or None if it passed."""
    examinee = Examinee(control, listener)
    try:
        signal.setitimer(signal.ITIMER_REAL, task["timeout_s"])
        try:
            take(test, task, examinee)
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except TimeUp:
        return f"it took longer than {task['timeout_s']:g} s"
    except AssertionError as error:
        return f"AssertionError: {error}"[:MOST_CHARACTERS].removesuffix(": ") + examinee.last[:MOST_CHARACTERS]
    except BaseException as error:  # noqa: BLE001 - any error means that the test failed
        return f"{type(error).__name__}: {error}"[:MOST_CHARACTERS]
    finally:
        examinee.end()
    return None


def expire(number, frame):
    raise TimeUp


def main():
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    sys.set_int_max_str_digits(0)
    nothing, verdict = os.open(os.devnull, os.O_RDWR), os.dup(1)
    ours, control = socket.socketpair()
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(ADDRESS)
    listener.listen()
    listener.settimeout(CONNECT_S)
    if os.fork() == 0:  # before anything is read, so that later forks know nothing
        os.close(verdict)
        ours.close()
        listener.close()
        for file in (0, 1, 2):
            os.dup2(nothing, file)
        make_examinees(JsonConnection(control))
    control.close()
    task = json.load(sys.stdin)
    for file in (0, 1):
        os.dup2(nothing, file)
    signal.signal(signal.SIGALRM, expire)
    control = JsonConnection(ours)
    messages = [examine(test, task, control, listener) for test in task["tests"]]
    with os.fdopen(verdict, "w") as file:
        file.write(f"\n{task['token']}{json.dumps(messages)}\n")


if __name__ == "__main__":
    main()
