"""`parse_module`: text to module by recursive descent; every written type is checked."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from ..argument_checks import check_kind
from ..errors import Error, TextError, did_you_mean
from ..ir.core import Function, Module, Op, Result, Value, Weight
from ..ir.declare import REGISTRY, op_class
from ..ir.gc_pause import collector_paused
from ..ir.mesh import Mesh
from ..ir.recorded import recorded_refusal
from ..ir.string_literals import shown_name
from ..ir.types import TensorType
from ..ir.verify import check_calls
from ..source import Loc
from ..weights import Ref, check_steps
from .cursor import VALUE, Cursor
from .literals import parse_literal, parse_type
from .references import parse_ref

T = TypeVar("T")
_LONGEST_ATTRIBUTES = 200  # tokens; a longer list is parsed by the general path
_DECLARED = "load the file that declares it with --load"
_ITEMS = ("file", "weight", "func")


def parse_module(text: str, filename: str = "<text>") -> Module:
    """The module that `text` describes; a TextError points at the error."""
    from .. import ops  # noqa: F401  # pyright: ignore[reportUnusedImport]  (registers them)

    check_kind("the text of a module", text, str, 'text, such as Path("m.irc").read_text()')
    cursor = Cursor(text, filename)
    try:
        with collector_paused():
            return _Parser(cursor).module()
    except TextError:
        raise
    except Error as error:
        cursor.fail(error.message)
    except RecursionError:
        cursor.fail("this is nested too deeply")


class _Parser:
    def __init__(self, cursor: Cursor) -> None:
        self.cursor = cursor
        self.types: dict[str, TensorType] = {}
        self.attributes: dict[tuple[type[Op] | str, ...], dict[str, Any]] = {}
        self.sizes: dict[Function, tuple[int, int]] = {}
        self.local = False

    def module(self) -> Module:
        c = self.cursor
        c.expect("module")
        module = Module(c.symbol())
        self.local = module.local = c.accept("local")
        if c.accept("mesh"):
            module.mesh = Mesh(tuple(self._pairs(c.integer).items()))
        if c.accept("dims"):
            module.dims = self._pairs(self._range)
        c.expect("{")
        while not c.accept("}"):
            self._item(module)
        if c.token:
            c.fail(f"expected the end of the text, found {c.shown}")
        return module

    def _item(self, module: Module) -> None:
        c = self.cursor
        if c.accept("file"):
            name = c.new_symbol(module.files, "file")
            c.expect("=")
            module.files[name] = c.string()
        elif c.accept("weight"):
            name = c.new_symbol(module.weights, "weight")
            c.expect(":")
            type = self._type()
            c.expect("=")
            module.weights[name] = Weight(type, name, self._ref(type, module))
        elif c.accept("func"):
            self._function(module)
        else:
            hint = did_you_mean(c.token, _ITEMS)
            c.fail(f"expected file, weight or func, found {c.shown}{hint}")

    def _ref(self, type: TensorType, module: Module) -> Ref:
        ref = parse_ref(self.cursor, module.files)
        try:
            check_steps(ref, type.ndim)
        except Error as error:
            self.cursor.fail(error.message, back=1)
        return ref

    def _pairs(self, value: Callable[[], T]) -> dict[str, T]:
        c = self.cursor
        pairs: dict[str, T] = {}
        for _ in c.items("(", ")"):
            name = c.word()
            if name in pairs:
                c.fail(f"{name} is defined twice", back=1)
            c.expect("=")
            pairs[name] = value()
        return pairs

    def _range(self) -> tuple[int, int, int]:
        c = self.cursor
        low = c.integer()
        c.expect(":")
        typical = c.integer()
        c.expect(":")
        high = c.integer()
        if not 0 <= low <= typical <= high:
            c.fail(
                f"a range is min:typical:max in ascending order, not {low}:{typical}:{high}", back=1
            )
        return low, typical, high

    def _type(self) -> TensorType:
        c = self.cursor
        type = self.types.get(c.token)
        if type is None:
            type = self.types[c.token] = parse_type(c, self.local)
        c.advance()
        return type

    def _function(self, module: Module) -> None:
        c = self.cursor
        name = c.new_symbol(module.functions, "function")
        args: dict[str, TensorType] = {}
        for _ in c.items("(", ")"):
            is_number = c.token[1:].isdigit()
            arg = c.argument()
            if arg in args:
                c.fail(f"%{arg} is defined twice", back=1)
            if is_number:
                c.fail(f"%{arg} is a number; an argument has a name such as %x", back=1)
            c.expect(":")
            args[arg] = self._type()
        function = Function(name, args.items())
        env: dict[str, Value] = {f"%{shown_name(str(a.name))}": a for a in function.args}
        env |= {f"@{w.name}": w for w in module.weights.values()}
        c.expect("->")
        at = c.index
        declared = self._results(function, env)
        c.expect("{")
        while not c.accept("}"):
            self._plain_operations(function, env)
            if c.token != "}":
                self._operation(module, function, env)
        self._check_results(function, declared, at)
        check_calls(function, self.sizes)
        module.functions[name] = function

    def _results(self, function: Function, env: dict[str, Value]) -> list[TensorType]:
        c = self.cursor
        types: list[TensorType] = []
        results: list[Result] = []
        for _ in c.items("(", ")"):
            name = c.result() if c.ahead == ":" else None
            if name is not None:
                c.expect(":")
            types.append(self._type())
            alias = None
            if c.accept("aliases"):
                if c.token not in env or c.token[:1] != "%":
                    c.fail(f"{c.shown} is not an argument of @{function.name}")
                alias = c.argument()
            results.append(Result(name, alias, bool(types[-1].global_type.varying)))
        if any(r.name or r.alias or r.varies for r in results):
            function.results = tuple(results)
        return types

    def _check_results(self, function: Function, declared: list[TensorType], at: int) -> None:
        if function.last is None or function.last.opname != "return":
            self.cursor.fail(f"@{function.name} does not end in return", back=1)
        returned = [v.type for v in function.returned]
        if returned != declared:
            text = ", ".join(map(str, returned))
            self.cursor.fail(f"@{function.name} returns ({text}), not the declared types", index=at)

    def _plain_operations(self, function: Function, env: dict[str, Value]) -> None:
        """Parse lines `%x = op %a, @b {...} : type` without a call per token or line.

        Nearly every line has this form, with attributes and a type that occurred before. The first
        line of another form, or with an error, is left to `_operation`.
        """
        tokens, line = self.cursor.tokens, self.cursor.index
        types, attributes_of = self.types, self.attributes
        while True:
            name, i = tokens[line], line + 2
            cls = REGISTRY.get(tokens[i]) if tokens[line + 1] == "=" and name not in env else None
            if cls is None or cls.variadic:
                break
            operands: list[Value] = []
            separator = ","
            while separator == "," and (value := env.get(tokens[i + 1])) is not None:
                operands.append(value)
                separator = tokens[i + 2]
                i += 2
            key: tuple[type[Op] | str, ...] = (cls,)
            if separator == "{" and "}" in tokens[i : i + _LONGEST_ATTRIBUTES]:
                start, i = i, tokens.index("}", i) + 1
                key = (cls, *tokens[start:i])
            attributes = attributes_of.get(key)
            if tokens[i] != ":" or attributes is None or len(operands) != len(cls.operand_names):
                break
            type = types.get(tokens[i + 1])
            if type is None or tokens[i + 2] in (",", "loc"):
                break
            hint = None
            if not name[1:].isdecimal():
                if not VALUE.fullmatch(name):
                    break
                hint = name[1:].partition(".")[0]
            try:
                op = cls(*operands, **attributes)
            except Error:
                break
            results = op.results
            if len(results) != 1 or results[0].type is not type:
                op.drop_operands()
                break
            env[name] = result = results[0]
            result.name = hint
            function.append(op)
            line = i + 2
        self.cursor.jump(line)

    def _operation(self, module: Module, function: Function, env: dict[str, Value]) -> None:
        c = self.cursor
        start = c.index
        names: list[str] = []
        if c.token[:1] == "%":
            names = self._result_names(env)
        cls = op_class(c.token, _DECLARED)
        at = c.index
        c.advance()
        operands, named = self._operands(env, cls)
        attributes = self._attributes(module, cls)
        op = self._build(cls, operands, named, attributes, at)
        if len(op.results) != len(names):
            wanted = len(op.results)
            c.fail(f"{op.opname} has {wanted} results, but {len(names)} are named", index=start)
        if names:
            self._written_types(op, names, env)
        if c.token == "loc":
            op.loc = self._loc()
        function.insert(op, None)
        if op.opname == "return" and c.token != "}":
            c.fail(f"expected }} after return, found {c.shown}")

    def _result_names(self, env: dict[str, Value]) -> list[str]:
        c = self.cursor
        names: list[str] = []
        while True:
            token = c.token
            if token in env or token in names:
                c.fail(f"{token} is defined twice")
            names.append("%" + c.value())
            if not c.accept(","):
                break
        c.expect("=")
        return names

    def _operands(
        self, env: dict[str, Value], cls: type[Op]
    ) -> tuple[list[Value], dict[str, Value]]:
        c = self.cursor
        plain: list[Value] = []
        named: dict[str, Value] = {}
        token = c.token
        while token[:1] in ("%", "@") or c.ahead == "=":
            name = None
            if token[0] not in "%@":
                name = c.word()
                if name in named or name not in cls.optional_names:
                    names = ", ".join(cls.optional_names) or "none"
                    c.fail(
                        f"{cls.opname} takes no operand {name!r} here (optional: {names})", back=1
                    )
                c.expect("=")
                token = c.token
            elif named:
                c.fail("an operand without a name follows a named operand")
            value = env.get(token)
            if value is None:
                kind = "used before it is defined" if token[:1] == "%" else "not declared"
                c.fail(f"{token} is {kind}" if token else f"expected a value, found {c.shown}")
            c.advance()
            if name is None:
                plain.append(value)
            else:
                named[name] = value
            if not c.accept(","):
                break
            token = c.token
            if token[:1] not in ("%", "@") and c.ahead != "=":
                c.fail(f"expected a value, found {c.shown}")
        return plain, named

    def _attributes(self, module: Module, cls: type[Op]) -> dict[str, Any]:
        c = self.cursor
        start = c.index
        values: dict[str, Any] = {}
        for _ in c.items("{", "}") if c.token == "{" else ():
            name = c.word()
            if name not in cls.attribute_types:
                hint = did_you_mean(name, cls.attribute_types)
                c.fail(f"{cls.opname} has no attribute {name!r}{hint}", back=1)
            if name in values:
                c.fail(f"{name} is defined twice", back=1)
            values[name] = parse_literal(c, module.functions) if c.accept("=") else True
        if not any(isinstance(v, Function) for v in values.values()):
            self.attributes[cls, *c.tokens[start : c.index]] = values
        return values

    def _build(
        self,
        cls: type[Op],
        operands: list[Value],
        named: dict[str, Value],
        attributes: dict[str, Any],
        at: int,
    ) -> Op:
        fixed = len(cls.operand_names) - cls.variadic
        missing = [n for n in cls.attribute_types if n not in attributes]
        missing = [n for n in missing if n not in cls.attribute_defaults]
        if missing:
            self.cursor.fail(f"{cls.opname} needs the attribute {missing[0]}", index=at)
        if len(operands) < fixed or (len(operands) > fixed and not cls.variadic):
            names = ", ".join(cls.operand_names) or "none"
            self.cursor.fail(
                f"{cls.opname} takes {fixed} operands ({names}), not {len(operands)}", index=at
            )
        try:
            if cls.variadic:
                return cls(*operands[:fixed], operands[fixed:], **attributes)
            return cls(*operands, **named, **attributes)
        except Error as error:
            self.cursor.fail(error.message, index=at)

    def _written_types(self, op: Op, names: list[str], env: dict[str, Value]) -> None:
        c = self.cursor
        c.expect(":")
        for i, (name, result) in enumerate(zip(names, op.results, strict=True)):
            if i:
                c.expect(",")
            written = self._type()
            refusal = recorded_refusal(op, i, result.type, written)
            if refusal is not None:
                gives = f"but {op.opname} gives {result.type}"
                c.fail(f"{name} is written as {written}, {refusal or gives}", back=1)
            result.type = written
            hint = name[1:].partition(".")[0]
            result.name = None if hint.isdigit() else hint
            env[name] = result

    def _loc(self) -> Loc:
        c = self.cursor
        c.advance()
        c.expect("(")
        file = c.string()
        c.expect(":")
        line = c.integer()
        scope = c.string() if c.token[:1] == '"' else ""
        c.expect(")")
        return Loc(file, line, scope)
