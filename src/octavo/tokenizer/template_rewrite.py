"""Rewrites a chat template's syntax tree so that running it pays its way (see template_meter.py).

The inserted calls are Jinja filters under names that no template can spell.
"""

from __future__ import annotations

from typing import cast

from jinja2 import Environment, nodes

from octavo.tokenizer.template_meter import TemplateLimitError

ENTER, WEIGH, WEIGH_TOP, CONCAT, CONTAINS = (
    f"octavo {name}" for name in ("enter", "weigh", "weigh top", "concat", "contains")
)
_MAX_NODES = 10_000


def rewrite(template: nodes.Template) -> nodes.Template:
    rewriter = _Rewriter()
    rewriter.expression(template)
    template.set_environment(cast(Environment, template.environment))
    return template


def _call(name: str, value: nodes.Expr, *args: nodes.Expr) -> nodes.Filter:
    return nodes.Filter(value, name, list(args), [], None, None, lineno=value.lineno)


class _Rewriter:
    """`_nodes` and `_chars` count what belongs to the innermost block of statements."""

    def __init__(self) -> None:
        self._all = 0
        self._nodes = 0
        self._chars = 0

    def expression(self, node: nodes.Node) -> nodes.Node:
        """The node to put in the place of `node`; its children are replaced in place."""
        self._all += 1
        self._nodes += 1
        if self._all > _MAX_NODES:
            raise TemplateLimitError(f"it has more than {_MAX_NODES} syntax nodes")
        if isinstance(node, nodes.TemplateData):
            self._chars += len(node.data)
        for field, value in list(node.iter_fields()):
            if isinstance(value, nodes.Node):
                setattr(node, field, self.expression(value))
            elif isinstance(value, list):
                if field == "body" or (field == "else_" and value):
                    setattr(node, field, self._block(value, node.lineno))
                else:
                    setattr(node, field, [self.expression(v) if isinstance(v, nodes.Node) else v for v in value])
        return self._replaced(node)

    def _block(self, body: list[nodes.Node], lineno: int) -> list[nodes.Node]:
        outer = self._nodes, self._chars
        self._nodes = 1
        self._chars = 0
        rewritten = [self.expression(node) for node in body]
        enter = nodes.ExprStmt(self._enter(lineno), lineno=lineno)
        self._nodes, self._chars = outer
        return [enter, *rewritten]

    def _enter(self, lineno: int) -> nodes.Filter:
        nodes_, chars = (nodes.Const(count, lineno=lineno) for count in (self._nodes, self._chars))
        return _call(ENTER, nodes_, chars)

    def _replaced(self, node: nodes.Node) -> nodes.Node:
        if isinstance(node, nodes.For):
            if node.test is not None:  # runs for every item, also for those that never reach the body
                cost = nodes.Const(sum(1 for _ in node.test.find_all(nodes.Node)) + 1, lineno=node.lineno)
                node.test = nodes.And(
                    _call(ENTER, cost, nodes.Const(0, lineno=node.lineno)), node.test, lineno=node.lineno
                )
        elif isinstance(node, nodes.Concat):
            return _call(CONCAT, nodes.Tuple(node.nodes, "load", lineno=node.lineno))
        elif isinstance(node, nodes.Compare):
            return self._comparison(node)
        elif isinstance(node, nodes.Getitem):
            if isinstance(node.arg, nodes.Slice):
                node.node = _call(WEIGH_TOP, node.node)
            else:
                node.arg = _weighed(node.arg)
        elif isinstance(node, nodes.Pair):
            node.key = _weighed(node.key)
        return node

    def _comparison(self, node: nodes.Compare) -> nodes.Expr:
        operators = [operand.op for operand in node.ops]
        if operators in (["in"], ["notin"]):
            found = _call(CONTAINS, node.expr, node.ops[0].expr)
            return found if operators == ["in"] else nodes.Not(found, lineno=node.lineno)
        if "in" in operators or "notin" in operators:
            raise TemplateLimitError(f"line {node.lineno} chains 'in' with another comparison; that is not supported")
        node.expr = _weighed(node.expr)
        for operand in node.ops:
            operand.expr = _weighed(operand.expr)
        return node


def _weighed(expression: nodes.Expr) -> nodes.Expr:
    return expression if isinstance(expression, nodes.Const) else _call(WEIGH, expression)


def loops_over_content(template: nodes.Template) -> bool:
    """Whether the template walks through a message's content as a list of parts. It then gets the parts as they are;
    any other template expects one string."""
    names = {"content"}
    for assign in template.find_all(nodes.Assign):
        if isinstance(assign.target, nodes.Name) and _is_content(assign.node, names):
            names.add(assign.target.name)
    return any(_is_content(loop.iter, names) for loop in template.find_all(nodes.For))


def _is_content(node: nodes.Node | None, names: set[str]) -> bool:
    while isinstance(node, nodes.Filter) and node.name not in (ENTER, CONCAT, CONTAINS):
        node = node.node
    if isinstance(node, nodes.Getattr):
        return node.attr == "content"
    if isinstance(node, nodes.Getitem):
        return isinstance(node.arg, nodes.Const) and node.arg.value == "content"
    return isinstance(node, nodes.Name) and node.name in names
