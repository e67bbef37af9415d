"""Where values go in a module's forward, by its source. What is not plain to see is not said."""

import ast
import functools
import inspect
import textwrap
from collections.abc import Callable, Collection

# What runs once, in order, whenever the statement around it does.
_STRAIGHT = (
    ast.Call, ast.keyword, ast.Attribute, ast.Subscript, ast.Starred, ast.Tuple, ast.List, ast.BinOp,
    ast.UnaryOp,
)  # fmt: skip
_SIMPLE = ast.Assign, ast.AnnAssign, ast.Return, ast.Expr
_SCOPES = ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda, ast.ClassDef
_ATTRIBUTES = {"shape", "dtype", "device", "ndim"}
_METHODS = {"dim", "size"}


class Forward:
    """The source of a module's forward."""

    def __init__(self, node: ast.FunctionDef, local: Collection[str]):
        arguments = node.args
        self.body, self.positional = node.body, [a.arg for a in (*arguments.posonlyargs, *arguments.args)]
        self.named = [a.arg for a in (*arguments.args, *arguments.kwonlyargs)]
        nodes = [n for statement in node.body for n in ast.walk(statement)]
        self.parents = {child: n for n in (node, *nodes) for child in ast.iter_child_nodes(n)}
        self.names = _named(nodes)
        imported = (n.name for n in nodes if isinstance(n, ast.alias))
        # The code's table of names has those of attributes, of what is global, and of imports.
        self.table = [n.attr for n in nodes if isinstance(n, ast.Attribute)]
        self.table += [n.id for n in self.names if n.id not in local]
        self.table += [part for name in imported for part in name.split(".")]
        self.calls = [n for n in nodes if isinstance(n, ast.Call)]
        declared = (n.names for n in nodes if isinstance(n, (ast.Global, ast.Nonlocal)))
        scopes = [n for n in nodes if isinstance(n, _SCOPES)]
        inner = (n.id for scope in scopes for n in _named(ast.walk(scope)))
        # Names that something else than the statements, in their order, may read or write.
        self.shared = {*inner, *(name for names in declared for name in names)}

    @classmethod
    def of(cls, function: Callable) -> "Forward | None":
        """Of a function with no decorators that is written as a method, else None."""
        return _forward(function)

    @property
    def owner(self) -> str:
        """The module's name, `self`."""
        return self.positional[0]

    def passes(self, call: ast.Call, use: ast.expr) -> int | str | None:
        """As what a call of a module is given `use`, by position or by name; None if not once by itself."""
        if any(isinstance(argument, ast.Starred) for argument in call.args):
            return None
        given = [*enumerate(call.args), *((k.arg, k.value) for k in call.keywords)]
        return next((key for key, value in given if value is use), None)

    def parameter(self, key: int | str) -> str | None:
        """That a caller gives by position, after the module itself, or by name."""
        if isinstance(key, str):
            return key if key in self.named else None
        return self.positional[key + 1] if key + 1 < len(self.positional) else None

    def child(self, node: ast.expr) -> str | None:
        """The name of what a node `self.<name>` reads, if nothing else in the code has that name."""
        if not isinstance(node, ast.Attribute) or not isinstance(node.value, ast.Name):
            return None
        if node.value.id != self.owner or not isinstance(node.ctx, ast.Load):
            return None
        return node.attr if self.table.count(node.attr) == 1 else None

    def call_of(self, child: str) -> ast.Call | None:
        """The one use of a child, `self.<child>(x)`, where that is straight."""
        for call in self.calls:
            if self.child(call.func) == child and self.is_straight(call):
                is_one = len(call.args) == 1 and not isinstance(call.args[0], ast.Starred)
                return call if is_one and not call.keywords else None
        return None

    def is_straight(self, node: ast.AST) -> bool:
        """Whether it runs once, whenever forward comes to its statement, one of forward's own."""
        parent = self.parents[node]
        while isinstance(parent, _STRAIGHT):
            parent = self.parents[parent]
        return isinstance(parent, _SIMPLE) and parent in self.body

    def uses_of_value(self, call: ast.Call) -> list[ast.expr] | None:
        """All that read a call's value: the call itself within an expression, or the name it is assigned to
        as often as that is read; None where that is not plain."""
        statement = self.parents[call]
        if not isinstance(statement, ast.Assign):
            return [call]
        target = statement.targets[0]
        if len(statement.targets) != 1 or not isinstance(target, ast.Name) or target.id in self.shared:
            return None
        uses = []
        for after in self.body[self.body.index(statement) + 1 :]:
            names = [n for n in _named(ast.walk(after)) if n.id == target.id]
            uses += [n for n in names if isinstance(n.ctx, ast.Load)]
            written = [n for n in names if not isinstance(n.ctx, ast.Load)]
            # Within a branch or a loop it may not be written.
            if any(not self._is_target(n, after) for n in written):
                return None
            if written:
                break
        return uses

    def uses_of_parameter(self, name: str) -> list[ast.expr] | None:
        """All that read it; None if anything writes it."""
        uses = [n for n in self.names if n.id == name]
        return uses if all(isinstance(n.ctx, ast.Load) for n in uses) else None

    def _is_target(self, name, statement):
        """Whether a name is assigned by the statement, itself or in a tuple."""
        node = name
        while isinstance(self.parents[node], (ast.Tuple, ast.List, ast.Starred)):
            node = self.parents[node]
        return isinstance(statement, ast.Assign) and node in statement.targets

    def reader(self, uses: list[ast.expr]) -> tuple[str, ast.Call, int | str] | None:
        """The child that alone is given a value, once: its name, the call, and as what it is given. The value's
        shape, dtype and device may be asked for."""
        uses = [use for use in uses if not self._is_asked(use)]
        if len(uses) != 1:
            return None
        (use,) = uses
        call = self.parents[use]
        call = self.parents[call] if isinstance(call, ast.keyword) else call
        if not isinstance(call, ast.Call) or not self.is_straight(call):
            return None
        name, key = self.child(call.func), self.passes(call, use)
        return None if name is None or key is None else (name, call, key)

    def called_with(self, uses: list[ast.expr], children: Collection[str]) -> tuple[str, ...]:
        """Which children a value goes to, each called once with it alone; none if it goes elsewhere."""
        names = []
        for use in uses:
            if self._is_asked(use):
                continue
            reader = self.reader([use])
            if reader is None or reader[0] not in children:
                return ()
            name, call, key = reader
            if key != 0 or len(call.args) != 1 or call.keywords:
                return ()
            names.append(name)
        return tuple(names)

    def _is_asked(self, use):
        attribute = self.parents[use]
        if not isinstance(attribute, ast.Attribute) or not isinstance(attribute.ctx, ast.Load):
            return False
        call = self.parents[attribute]
        is_called = isinstance(call, ast.Call) and call.func is attribute
        return attribute.attr in (_METHODS if is_called else _ATTRIBUTES)


def _named(nodes):
    """Names, as they are written one after the other."""
    return sorted((n for n in nodes if isinstance(n, ast.Name)), key=lambda n: (n.lineno, n.col_offset))


@functools.cache
def _forward(function):
    if not inspect.isfunction(function) or hasattr(function, "__wrapped__"):
        return None
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
    except (OSError, TypeError, SyntaxError):  # there is none, or not of this alone
        return None
    node = tree.body[0] if len(tree.body) == 1 else None
    if not isinstance(node, ast.FunctionDef) or node.name != function.__code__.co_name:
        return None
    code = function.__code__
    forward = Forward(node, {*code.co_varnames, *code.co_cellvars, *code.co_freevars})
    if not forward.positional or code.co_varnames[: code.co_argcount] != tuple(forward.positional):
        return None
    is_kept = all(isinstance(n.ctx, ast.Load) for n in forward.names if n.id == forward.owner)
    return forward if is_kept else None
