"""Masks as text, such as ``"Causal() & (Window(4) | First(1))"``: parsed, never evaluated."""

from __future__ import annotations

import ast

from attention.masks import values

_PRIMITIVES = {
    mask.__name__: mask
    for mask in (
        values.Full,
        values.Causal,
        values.Window,
        values.Global,
        values.First,
        values.Prefix,
    )
}

_LONGEST = 1000


def parse(text: str) -> values.Mask:
    """The mask that a text such as ``"Causal() & Window(8)"`` describes.

    Raises:
      ValueError: the text is not an expression of the known masks with ``&``, ``|`` and ``~``.
    """
    if len(text) > _LONGEST:
        raise ValueError(f"a mask of {len(text)} characters is too long; {_LONGEST} are allowed")
    try:
        return _mask(ast.parse(text.strip(), mode="eval").body, text)
    except SyntaxError as error:
        raise ValueError(f"mask {text!r} is not an expression: {error.msg}") from None
    except (RecursionError, MemoryError):
        raise ValueError(f"mask {text[:40]!r}… is nested too deeply") from None


def _mask(node: ast.AST, text: str) -> values.Mask:
    match node:
        case ast.BinOp(left=left, op=ast.BitAnd(), right=right):
            return _mask(left, text) & _mask(right, text)
        case ast.BinOp(left=left, op=ast.BitOr(), right=right):
            return _mask(left, text) | _mask(right, text)
        case ast.UnaryOp(op=ast.Invert(), operand=operand):
            return ~_mask(operand, text)
        case ast.Call(func=ast.Name(id=name), args=arguments, keywords=keywords):
            if name not in _PRIMITIVES:
                raise ValueError(
                    f"mask {text!r}: {name!r} is unknown; known are {', '.join(_PRIMITIVES)}"
                )
            positional = [_number(argument, text) for argument in arguments]
            names = [keyword.arg for keyword in keywords]
            if len(set(names)) < len(names):
                raise ValueError(f"mask {text!r}: an argument of {name} is given twice")
            named = {keyword.arg: _number(keyword.value, text) for keyword in keywords}
            try:
                return _PRIMITIVES[name](*positional, **named)
            except TypeError as error:
                reason = str(error).replace(f"{name}.__init__()", f"{name}()")
                raise ValueError(f"mask {text!r}: {reason}") from None
    part = ast.unparse(node)
    hint = f"; write {part}()" if part in _PRIMITIVES else ""
    raise ValueError(
        f"mask {text!r}: {part!r} is not understood{hint}; a mask is built from "
        f"{', '.join(f'{name}()' for name in _PRIMITIVES)} with & | ~ and parentheses"
    )


def _number(node: ast.AST, text: str) -> int | tuple[int, ...]:
    try:
        value = ast.literal_eval(node)
    except (ValueError, TypeError):
        value = None
    whole = value if isinstance(value, tuple) else (value,)
    if not all(type(number) is int for number in whole):
        raise ValueError(
            f"mask {text!r}: {ast.unparse(node)!r} must be a whole number or a tuple of them"
        )
    return value
