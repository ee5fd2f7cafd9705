"""A jinja2 environment in which a hostile template can neither escape nor go on.

jinja2's immutable sandbox keeps a template from attributes it should not reach; it does
not bound what is left: nested loops, strings that double, a format width of a billion.
Here everything that can grow is charged to a `Meter` before it happens, so rendering
ends with a sentence after a bounded amount of work, the same amount on every machine:

* each turn of a loop, each call, operator, filter and output is a step;
* whatever they produce is charged by its length, and a turn of a loop by the fixed text
  it may write as well;
* an operator that could produce much at once (`*`, `**`, `+`, `~`) is asked first;
* what has no bound of its own and no use in a chat template is not there at all.

Compiled loops are not interpreted by us, so `_Metered` rewrites the syntax tree before
it is compiled: a loop reads its iterable, and a literal or `~` passes its value,
through a filter that charges.
"""

from __future__ import annotations

import functools
import math
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Final

import jinja2
from jinja2 import nodes
from jinja2.runtime import LoopContext, Undefined
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace

STEPS: Final = 200_000
"""Loop turns, calls, operators, filters and outputs of one rendering."""
PRODUCED: Final = 64 * 1024 * 1024
"""Characters and items that one rendering may produce on the way, in all."""
ITEMS: Final = 20_000
"""Most items of one value, nested ones counted as often as they occur."""
SECONDS: Final = 5.0
"""What is left of time when all else is bounded; only comparisons come near it."""
BITS: Final = 256
"""Longest integer."""
DEPTH: Final = 16
"""Deepest nesting of a value."""
SIZED: Final = (str, bytes, list, tuple, dict, set, frozenset)
SOURCE: Final = 256 * 1024
"""Longest template, in characters."""

FILTERS: Final = frozenset(
    {
        *("abs", "capitalize", "count", "d", "default", "dictsort", "e", "escape"),
        *("first", "float", "int", "items", "join", "last", "length"),
        *("list", "lower", "map", "max", "min", "reject", "rejectattr", "replace"),
        *("reverse", "round", "safe", "select", "selectattr", "sort", "string"),
        *("sum", "title", "trim", "unique", "upper"),
    }
)
"""Filters whose result is no longer than what they were given, `join` and `replace`
aside, which are asked first."""

METHODS: Final = frozenset(
    {
        *("capitalize", "count", "endswith", "find", "get", "index", "isalnum"),
        *("isalpha", "isdigit", "islower", "isspace", "isupper", "items", "join"),
        *("keys", "lower", "lstrip", "partition", "removeprefix", "removesuffix"),
        *("replace", "rfind", "rpartition", "rsplit", "rstrip", "split"),
        *("splitlines", "startswith", "strip", "title", "upper", "values"),
    }
)
"""Methods of strings and containers a template may call, under the same rule."""

_TURNS, _BUILT, _JOINED, _TEXT = (
    f"kiln {name}" for name in ("turns", "built", "joined", "text")
)
"""Filters the rewriting puts in; no template can spell them."""


class TemplateLimit(jinja2.TemplateError):
    """A template wanted more than a rendering may have."""


class Meter(threading.local):
    """What the rendering of this thread has used."""

    steps = 0
    produced = 0
    deadline = math.inf

    def reset(self) -> None:
        """Begin a rendering."""
        self.steps = self.produced = 0
        self.deadline = time.monotonic() + SECONDS

    def charge(self, size: int = 0) -> None:
        """Count one step that produces `size` characters or items.

        Raises:
            TemplateLimit: The rendering has used up what it may.
        """
        self.steps += 1
        self.produced += size
        spent = self.steps > STEPS or self.produced > PRODUCED
        if spent or time.monotonic() > self.deadline:
            raise TemplateLimit("it takes more work than a chat template may")

    def length(self, value: Any) -> Any:
        """Charge a value by its own length, and return it.

        Raises:
            TemplateLimit: It is too large a number, or the work is used up.
        """
        if isinstance(value, int) and value.bit_length() > BITS:
            raise TemplateLimit("a number is too large")
        self.charge(len(value) if isinstance(value, SIZED) else 1)
        return value

    def whole(self, value: Any) -> Any:
        """Charge a value by all that would be written of it, and return it.

        Raises:
            TemplateLimit: It is nested too deep, too large, or hides a namespace,
                which could grow later.
        """
        waiting, items = [(value, 0)], 0
        while waiting:
            one, depth = waiting.pop()
            self.length(one)
            if isinstance(one, Mapping):
                one = [*one.keys(), *one.values()]
            if isinstance(one, Namespace) and depth:
                raise TemplateLimit("a namespace cannot be part of a value")
            if isinstance(one, list | tuple | set | frozenset):
                items += len(one)
                if depth > DEPTH or items > ITEMS:
                    raise TemplateLimit("a value is nested too deep or too large")
                waiting += [(item, depth + 1) for item in one]
        return value


class MeteredEnvironment(ImmutableSandboxedEnvironment):
    """The sandbox with a meter."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self) -> None:
        """Create an environment with the settings chat templates are written for."""
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=["jinja2.ext.loopcontrols"],
            finalize=self._finalised,
        )
        self.meter = Meter()
        for name in set(self.globals) - {"dict", "namespace", "range"}:
            del self.globals[name]
        self.filters = {
            name: self.metered(function)
            for name, function in self.filters.items()
            if name in FILTERS
        }
        self.filters |= {
            "join": self._join,
            "replace": self._replace,
            "string": self._string,
            _BUILT: self.meter.whole,
            _JOINED: self._join,
            _TEXT: self._text,
            _TURNS: self._turns,
        }

    def metered(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return a filter that charges for what it is given and what it returns."""
        first = int(hasattr(function, "jinja_pass_arg"))  # a context is no value

        @functools.wraps(function)  # which carries that attribute over
        def charged(*arguments: Any, **options: Any) -> Any:
            for argument in (*arguments[first:], *options.values()):
                self.meter.length(argument)
            return self.meter.length(function(*arguments, **options))

        return charged

    def render(self, template: jinja2.Template, variables: Mapping[str, Any]) -> str:
        """Render within the limits.

        Args:
            template: Made by this environment.
            variables: What it may use.

        Raises:
            TemplateLimit: It wants more than it may have.
        """
        self.meter.reset()
        pieces, length = [], 0
        try:
            for piece in template.generate(variables):
                length += len(piece)
                if length > PRODUCED:
                    raise TemplateLimit("it writes more than a chat template may")
                pieces.append(piece)
        except (RecursionError, MemoryError) as error:
            raise TemplateLimit("it nests deeper than a chat template may") from error
        return "".join(pieces)

    def _parse(
        self, source: str, name: str | None, filename: str | None
    ) -> nodes.Template:
        """Parse and rewrite.

        Raises:
            TemplateLimit: The source is too long, or uses a recursive loop.
        """
        if len(source) > SOURCE:
            raise TemplateLimit("it is too long")
        try:
            tree = _metered(super()._parse(source, name, filename))
        except RecursionError as error:
            raise TemplateLimit("it nests deeper than a chat template may") from error
        tree.set_environment(self)
        return tree

    def wrap_str_format(self, value: Any) -> None:
        """Leave `str.format` to the list of methods, on which it is not."""

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Tell whether a template may use an attribute: methods by list only."""
        if isinstance(obj, str | bytes | int | float | list | tuple | dict):
            return attr in METHODS and super().is_safe_attribute(obj, attr, value)
        safe: bool = super().is_safe_attribute(obj, attr, value)
        return safe

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Apply an operator whose result can be larger than its operands.

        Raises:
            TemplateLimit: It would be too large.
        """
        numbers = isinstance(left, int | float) and isinstance(right, int | float)
        if operator == "%" and not numbers:
            raise TemplateLimit("it formats strings with %")
        if operator == "**" and not (numbers and abs(left) < 2**16 and abs(right) < 16):
            raise TemplateLimit("a power is too large")
        self.meter.length(left)
        self.meter.length(right)
        if operator == "*" and not numbers:
            sizes = [len(side) for side in (left, right) if isinstance(side, SIZED)]
            counts = [side for side in (left, right) if isinstance(side, int)]
            self.meter.charge(max([1, *sizes]) * max([0, *counts]))
        return self.meter.length(super().call_binop(context, operator, left, right))

    def call(self, context: Any, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call something a template names.

        Raises:
            TemplateLimit: The result would be too large, or it is a recursive loop.
        """
        if isinstance(obj, LoopContext):
            raise TemplateLimit("it loops recursively")
        for argument in (*args, *kwargs.values()):
            self.meter.length(argument)
        owner = getattr(obj, "__self__", None)
        if isinstance(owner, str):
            self.meter.charge(len(owner))
            bounded: dict[str, Callable[..., str]] = {
                "join": self._join_method,
                "replace": self._replace,
            }
            if obj.__name__ in bounded:
                return bounded[obj.__name__](owner, *args, **kwargs)
        result = super().call(context, obj, *args, **kwargs)
        return self.meter.whole(result) if obj is dict else self.meter.length(result)

    @jinja2.pass_context  # so that nothing is folded before rendering
    def _text(self, _context: Any, nothing: str, size: int) -> str:
        """Charge for the fixed text that follows."""
        self.meter.charge(size)
        return nothing

    def _turns(self, values: Any, size: int) -> Iterator[Any]:
        """Hand out what a loop goes over, charging for each turn and its fixed text."""
        for value in values:
            self.meter.charge(size)
            yield value

    def _string(self, value: Any) -> str:
        """Return a value as text."""
        return str(self.meter.whole(value))

    def _join(
        self, values: Iterable[Any], d: str = "", attribute: str | None = None
    ) -> str:
        """Join as the filter of that name does, without attributes.

        Raises:
            TemplateLimit: The result would be too large, or attributes are asked for.
        """
        if attribute is not None:
            raise TemplateLimit("it joins attributes")
        texts, between = [], str(d)
        for value in values:
            self.meter.charge(len(between))
            texts.append(self._string(value))
        return between.join(texts)

    def _join_method(self, separator: str, values: Iterable[Any]) -> str:
        return self._join(values, separator)

    def _replace(self, text: str, old: str, new: str, count: int = -1) -> str:
        """Replace, the length of the result known first."""
        text, old, new = str(text), str(old), str(new)
        found = text.count(old)
        turns = found if count is None or count < 0 else min(count, found)
        self.meter.charge(len(text) + max(0, len(new) - len(old)) * turns)
        return text.replace(old, new, turns)

    def _finalised(self, value: Any) -> Any:
        """Check what is about to be written.

        Raises:
            TemplateLimit: It is nothing a chat template writes.
        """
        if isinstance(value, Undefined) or value is None:
            return value
        if not isinstance(value, str | int | float | list | tuple | dict):
            raise TemplateLimit(f"it writes a {type(value).__name__}")
        return self.meter.whole(value)


def _metered(tree: nodes.Template) -> nodes.Template:
    """Put charges into loops, macros, literals and `~`."""
    macros: list[Any] = list(tree.find_all((nodes.Macro, nodes.CallBlock)))
    for macro in macros:
        size = nodes.Const(_fixed_text(macro))
        first = nodes.Output([_filtered(_TEXT, nodes.Const(""), size)])
        macro.body.insert(0, first)
    for loop in list(tree.find_all(nodes.For)):
        size = nodes.Const(_fixed_text(loop))
        loop.iter = _filtered(_TURNS, loop.iter, size)
    for parent in [*reversed([*tree.find_all(nodes.Node)]), tree]:
        for name, value in list(parent.iter_fields()):
            if isinstance(value, nodes.Node):
                setattr(parent, name, _charged(value))
            elif isinstance(value, list):
                setattr(parent, name, [_charged(item) for item in value])
    return tree


def _fixed_text(node: nodes.Node) -> int:
    """Return how much text a node holds that is there from the start."""
    plain = sum(len(each.data) for each in node.find_all(nodes.TemplateData))
    constants = (each.value for each in node.find_all(nodes.Const))
    return plain + sum(len(value) for value in constants if isinstance(value, str))


def _charged(node: Any) -> Any:
    """Return a node behind the filter that charges for it, where it needs one."""
    if isinstance(node, nodes.Concat):
        return _filtered(_JOINED, nodes.List(node.nodes, lineno=node.lineno))
    literal = isinstance(node, nodes.List | nodes.Dict)
    if literal or (isinstance(node, nodes.Tuple) and node.ctx == "load"):
        return _filtered(_BUILT, node)
    return node


def _filtered(name: str, node: Any, *arguments: nodes.Expr) -> nodes.Filter:
    line = node.lineno
    return nodes.Filter(node, name, list(arguments), [], None, None, lineno=line)
