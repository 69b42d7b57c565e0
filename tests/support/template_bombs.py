"""Chat templates that try to use up time, memory or the stack, or to leave the sandbox."""

from __future__ import annotations


def again(body: str, a: str = "''") -> str:
    """`body` run 100,000 times with `a` set."""
    return "{% set a = " + a + " %}{% for i in range(100000) %}" + body + "{% endfor %}"


def grown(start: str, step: str, end: str = "", times: int = 99) -> str:
    """s, from `start`, replaced by `step` again and again; then `end`."""
    loop = "{% for i in range(" + str(times) + ") %}{% set ns.s = " + step + " %}{% endfor %}"
    return "{% set ns = namespace(s=" + start + ") %}" + loop + end


LONG = "'a' * 4000000"
WORDS = "'a ' * 2000000"
ACCENTS = "'é' * 4000000"
PAGES = "{% for a in range(90000) %}" + "A" * 1000 + "{% endfor %}"

BOMBS = {
    "repeat": "{{ 'a' * 10**9 }}",
    "repeat list": "{{ [1] * 10**9 }}",
    "power": "{{ 10 ** (10 ** 9) }}",
    "power of two": "{{ 2 ** 99999999 }}",
    "percent width": "{{ '%1000000000d' % 1 }}",
    "percent star": "{{ '%*d' % (1000000000, 1) }}",
    "percent mapping": grown("'%(a)s'", "ns.s ~ ns.s", "{{ ns.s % {'a': 'x' * 100000} }}", times=16),
    "format filter": "{{ '%1000000000d'|format(1) }}",
    "format method": "{{ '{:1000000000}'.format(1) }}",
    "format nested": "{{ '{:{}}'.format(1, 1000000000) }}",
    "format many": "{{ ('{0}' * 100000).format('x' * 100000) }}",
    "format_map": "{{ '{a:999999999}'.format_map({'a': 1}) }}",
    "center method": "{{ 'a'.center(1000000000) }}",
    "ljust": "{{ 'a'.ljust(1000000000) }}",
    "zfill": "{{ 'a'.zfill(1000000000) }}",
    "expandtabs": "{{ '\t'.expandtabs(1000000000) }}",
    "expandtabs many": "{{ ('\t' * 1000000).expandtabs(1000000) }}",
    "center filter": "{{ 'a'|center(1000000000) }}",
    "indent": "{{ ('a\n' * 100000)|indent(100000) }}",
    "tojson indent": "{{ [1]|tojson(indent=1000000000) }}",
    "nested loops": again("{% for b in range(100000) %}{% endfor %}"),
    "nested loops that skip": again("{% for b in range(100000) if false %}{% endfor %}"),
    "loop output": PAGES,
    "macro output": "{% macro m() %}" + PAGES + "{% endmacro %}{{ m() }}",
    "set block": "{% set x %}" + PAGES + "{% endset %}",
    "doubling by ~": grown("'a'", "ns.s ~ ns.s"),
    "doubling by +": grown("'a'", "ns.s + ns.s"),
    "doubling list": grown("[1]", "ns.s + ns.s"),
    "doubling by replace": grown("'a'", "ns.s.replace('a', 'aa')"),
    "doubling in autoescape": "{% autoescape true %}" + grown("'<'", "ns.s ~ ns.s") + "{% endautoescape %}",
    "doubling escaped": grown("'<'", "ns.s|e|string ~ ns.s|e"),
    "squaring": grown("3", "ns.s * ns.s"),
    "doubling integer": grown("3", "ns.s + ns.s", times=99999),
    "shared list printed": grown("[1]", "[ns.s, ns.s]", "{{ ns.s }}"),
    "shared list as JSON": grown("[1]", "[ns.s, ns.s]", "{{ ns.s|tojson }}"),
    "shared list compared": grown("[1]", "[ns.s, ns.s]", "{{ ns.s == [ns.s[0], ns.s[1]] }}"),
    "shared tuple as key": grown("(1,)", "(ns.s, ns.s)", "{{ {ns.s: 1}|length }}"),
    "shared tuple as index": grown("(1,)", "(ns.s, ns.s)", "{{ {1: 1}[ns.s] }}"),
    "shared tuple looked up": grown("(1,)", "(ns.s, ns.s)", "{{ ns.s in {1: 1} }}"),
    "shared tuple by get": grown("(1,)", "(ns.s, ns.s)", "{{ {1: 1}.get(ns.s) }}"),
    "namespace printed": "{% set ns = namespace(a=1) %}{{ ns }}",
    "long compared": again("{% if a == b %}{% endif %}{% set b = a ~ '' %}", LONG),
    "long searched": again("{% if ('a' * 50 ~ 'b') in a %}{% endif %}", LONG),
    "long searched backwards": "{% set a = " + LONG + " %}{{ a.rfind('b' ~ 'a' * 100000) }}",
    "long stripped": "{{ (" + LONG + ").strip('b' * 4000000) }}",
    "long trimmed": "{{ (" + LONG + ")|trim('b' * 4000000) }}",
    "long upper": again("{% set b = a|upper %}", LONG),
    "long upper method": again("{% set b = a.upper() %}", LONG),
    "accents upper": again("{% set b = a.upper() %}", ACCENTS),
    "accents title": again("{% set b = a.title() %}", ACCENTS),
    "long islower": again("{% set b = a.islower() %}", LONG),
    "long test": again("{% if a is lower %}{% endif %}", LONG),
    "long slice": again("{% set b = a[1:] %}", LONG),
    "long list": "{% set a = " + LONG + " %}{{ (a|list)|length }}",
    "long changed": again("{% if loop.changed(a ~ '') %}{% endif %}", LONG),
    "long split": again("{% set b = a.split() %}", WORDS),
    "long title": again("{% set b = a|title %}", WORDS),
    "long wordcount": again("{% set b = a|wordcount %}", WORDS),
    "long truncate": again("{% set b = a|truncate(3999999) %}", WORDS),
    "long dictsort": again("{% set b = {'k': a}|dictsort %}", WORDS),
    "long sort": "{% set x = " + LONG + " %}{{ ([x] * 200)|sort|length }}",
    "join": "{{ range(100000)|join('x' * 100000) }}",
    "join method": "{{ ('x' * 100000).join('y' * 100000) }}",
    "sum of lists": "{{ ([[1]] * 100000)|sum(start=[]) }}",
    "round": "{{ 5|round(-1000000000) }}",
    "range": "{{ range(1000000000)|list }}",
    "huge range": "{{ range(10 ** 1000)|list }}",
    "generators": grown("range(100000)", "ns.s|select", "{{ ns.s|list|length }}", times=900),
    "attribute path": "{{ ([[[1]]] * 100000)|map(attribute='0.0.0.0.0.0.0.0.0.0.0.0')|list }}",
    "macro recursion": "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
    "macro tree": "{% macro m(n) %}{% if n %}{% set a = m(n - 1) ~ m(n - 1) %}{% endif %}{% endmacro %}{{ m(60) }}",
    "loop recursion": "{% for a in [1] recursive %}{{ loop([1]) }}{% endfor %}",
    "block recursion": "{% block a %}{{ self.a() }}{% endblock %}",
    "call recursion": "{% macro m() %}{{ caller() }}{% endmacro %}"
    "{% macro n() %}{% call m() %}{{ n() }}{% endcall %}{% endmacro %}{{ n() }}",
    "deep parentheses": "{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}",
    "long sum": "{{ 1" + "+1" * 30000 + " }}",
    "deep ifs": "{% if 1 %}" * 3000 + "{% endif %}" * 3000,
    "many nodes": "{{ a }}" * 18000,
    "many items": again("{% set x = [" + "1," * 30000 + "] %}"),
    "deep list": grown("[1]", "[ns.s]", "{{ ns.s }}", times=50000),
    "lipsum": "{{ lipsum(n=1000000) }}",
    "batch": "{{ [1]|batch(1000000000, 0)|list }}",
    "slice": "{{ [1]|slice(1000000000)|list }}",
    "to_bytes": "{{ (5).to_bytes(1000000000, 'big') }}",
    "fromkeys": again("{% set d = dict.fromkeys(range(100000)) %}"),
    "cycle": again("{{ loop.cycle(*range(100000)) }}"),
    "star arguments": "{% macro m() %}{{ varargs|length }}{% endmacro %}" + again("{% set x = m(*range(100000)) %}"),
    "groupby": again("{% set x = range(1000)|map('string')|list|groupby(0) %}"),
    "loop length": again("{% for j in range(100000)|map('string') %}{{ loop.length }}{% break %}{% endfor %}"),
    "markup format": "{{ ('%s' * 100000)|safe % (('x' * 100000,) * 100000) }}",
    "strftime": "{{ strftime_now('%c' * 1000000) }}",
    "include": "{% include 'x' %}",
    "unclosed": "{% for a in b %}",
    "class": "{{ ''.__class__.__mro__ }}",
    "append": "{{ messages.append(1) }}",
    "update": "{{ messages[0].update({}) }}",
}

# Unsafe access gives Jinja's undefined value, which prints as nothing.
HARMLESS = {
    "class by filter": "{{ ''|attr('__class__') }}",
    "class by format": "{{ '{0.__class__}'.format(1) }}",
}
