"""The pages' templates, for jinja2. `BASE` is the frame; those named for kinds fill its body, with tables from `PARTS`."""

from __future__ import annotations

PARTS = """\
{% macro table(rows, caption="") %}
<table>
{% if caption %}<caption>{{ caption }}</caption>{% endif %}
<thead><tr>{% for cell in rows[0] %}<th scope="col">{{ cell }}</th>{% endfor %}</tr></thead>
<tbody>
{% for row in rows[1:] %}
<tr><th scope="row">{{ row[0] }}</th>{% for cell in row[1:] %}<td>{{ cell }}</td>{% endfor %}</tr>
{% endfor %}
</tbody>
</table>
{% endmacro %}
"""

BASE = """\
<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; img-src data:; style-src 'unsafe-inline'">
<title>{% block title %}{% endblock %}</title>
<style>
:root { color-scheme: light dark; --page: #ffffff; --ink: #1a1a1a; --soft: #595959; --line: #d0d0d0; }
@media (prefers-color-scheme: dark) { :root { --page: #16181c; --ink: #e8e8e8; --soft: #a8a8a8; --line: #44474d; } }
body { background: var(--page); color: var(--ink); font: 16px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 70rem;
  padding: 0 1rem; }
h1 { font-size: 1.5rem; } h2 { font-size: 1.2rem; margin-top: 2.2rem; }
p.note, figcaption, caption { color: var(--soft); }
table { border-collapse: collapse; margin: 0.8rem 0; font-variant-numeric: tabular-nums; }
caption { text-align: left; }
th, td { border-bottom: 1px solid var(--line); padding: 0.2rem 0.9rem 0.2rem 0; text-align: right; }
th:first-child { text-align: left; font-weight: normal; } thead th, thead th:first-child { font-weight: 600; }
figure { margin: 1rem 0; } img { background: #ffffff; border-radius: 4px; max-width: 100%; height: auto; }
dt { font-weight: 600; } dd { margin: 0 0 0.4rem 1.2rem; }
.side { display: flex; flex-wrap: wrap; gap: 0 3rem; align-items: flex-start; }
.token, pre.text { font-family: ui-monospace, "DejaVu Sans Mono", Menlo, Consolas, monospace; }
pre.text { font-size: 0.95rem; line-height: 1.65; margin: 0.8rem 0 1.6rem; overflow-wrap: anywhere; white-space: pre-wrap; }
pre.text span { border-left: 1px solid var(--page); padding: 0.1rem 0; }
.legend span { border-radius: 3px; margin-right: 0.4rem; padding: 0.1rem 0.6rem; }
{% block style %}{% endblock %}
</style>
</head>
<body>
{% block body %}{% endblock %}
<p class="note">Made by FathomLM {{ about.version }}.</p>
</body>
</html>
"""

ROUTING = """\
{% extends "base" %}
{% block title %}{{ about.name }}: routing{% endblock %}
{% block style %}
{% for each in depths %}
.d{{ each.depth }} { background: {{ each.colour }}; color: {{ each.ink }}; }
{% endfor %}
{% endblock %}
{% block body %}
{% set expert = numbers.router == "expert" %}
<h1>{{ about.name }}: how its tokens are routed</h1>
<p class="note">{{ about.model }}: {{ about.plan }}; {{ about.dtype }} on {{ about.device }}; {{ numbers.rows }} rows of
{{ numbers.context }} tokens from {{ about.data | join(", ") }}.</p>
<div class="side">
{% from "parts" import table %}
{{ table(summary) }}
{{ table(flops) }}
</div>
<dl>
{% if expert %}
<dt>top-k and causal</dt>
<dd>In training each recursion keeps the best tokens of a row, which it must see whole. In use a score decides on each token
as it comes. The causal loss is {{ "%+.4f" | format(numbers.loss_difference) }} nats against the top-k loss.</dd>
<dt>sampling accuracy</dt><dd>How often the causal rule says of a token what the top-k selection said.</dd>
<dt>dead token ratio</dt><dd>The part of a row's positions that the last recursion took in none of the rows.</dd>
{% else %}
<dt>MaxVio</dt><dd>How far the fullest depth lies above an even share of the tokens; 0 is even.</dd>
<dt>entropy</dt><dd>Of the router's mean scores over the depths, in nats; at its most, all depths are alike to it.</dd>
{% endif %}
<dt>forward FLOPs</dt>
<dd>Counted as the thesis counts them, without embeddings and head. Unrouted is the same model with every token at full
depth.</dd>
</dl>

<h2>Text by depth</h2>
<p class="note">Each token stands on the colour of the number of recursions that ran at its place, to predict the token
behind it. Point at one to see its router scores. · is a token that ends within a character, ↵ a line end. The legend gives
the part of all tokens at each depth.</p>
<p class="legend">
{% for depth, share in shares.items() %}
<span class="d{{ depth }}">{{ depth }}</span>{{ "%.1f" | format(100 * share) }}%&emsp;
{% endfor %}
</p>
{% for text in texts %}
<pre class="text">
{%- for token in text -%}
<span class="d{{ token.depth }}" title="{{ token.note }}">{{ token.text }}</span>
{%- endfor -%}
</pre>
{% endfor %}

<h2>Router scores</h2>
<figure><img src="{{ images.scores }}" alt="Histograms of router scores, selected and unselected tokens apart">
<figcaption>
{% if expert %}
The scores by which the causal rule decides, split by what the top-k selection did. Where the two do not overlap and the
dashed line runs between them, causal decisions are those of training.
{% else %}
The score that tokens gave each depth, split by whether they chose it.
{% endif %}
</figcaption></figure>
{{ table(scores) }}

<h2>Test-time scaling</h2>
<figure><img src="{{ images.scaling }}" alt="Loss by maximum depth, and log-likelihood by position for each maximum depth">
<figcaption>The same text with fewer recursions allowed. A curve that rises on the right says that depth pays, and from which
position on.</figcaption></figure>
{{ table(scaling) }}

<h2>Is depth spent where it lowers the loss?</h2>
<p class="note">The tokens of each depth with one recursion for all tokens, at the depths that the routers chose, and with
every recursion for all. Beside it, the same depths dealt out at random within each row: the difference at equal cost is what
the choice is worth.</p>
<div class="side">
{{ table(gain) }}
{{ table(worth) }}
</div>

<h2>Which tokens go deep</h2>
<p class="note">Mean depth at the tokens that occur at least {{ numbers.seen }} times.
{% if not numbers.deepest %}
No token does: give more text.
{% endif %}
</p>
<div class="side">
{% for title, tokens in (("deepest", numbers.deepest), ("shallowest", numbers.shallowest)) if tokens %}
<table>
<thead><tr><th scope="col">{{ title }}</th><th scope="col">mean depth</th><th scope="col">seen</th></tr></thead>
<tbody>
{% for each in tokens %}
<tr><th scope="row" class="token">{{ label(each.text) }}</th><td>{{ "%.2f" | format(each.mean_depth) }}</td>
<td>{{ "{:,}".format(each.count) }}</td></tr>
{% endfor %}
</tbody>
</table>
{% endfor %}
</div>
{% endblock %}
"""

KV = """\
{% extends "base" %}
{% block title %}{{ about.name }}: keys and values{% endblock %}
{% block body %}
{% from "parts" import table %}
<h1>{{ about.name }}: hidden states, keys and values from step to step</h1>
<p class="note">{{ about.model }}: {{ about.plan }}; {{ about.dtype }} on {{ about.device }}; {{ numbers.rows }}
row{{ "s" if numbers.rows > 1 }} of {{ numbers.context }} tokens from {{ about.data | join(", ") }}.</p>
<figure><img src="{{ images.kv }}" alt="Heat maps of lengths by step and position, and of cosines between steps">
<figcaption>Above: how long the vectors are, at each step (from the top) and position (from the left). Below: how alike the
same token's vectors are at two steps; 1 is the same direction. White lines part the recursions; grey is a step that no token
ran.</figcaption></figure>
{{ table(summary) }}
<dl>
<dt>cosine tied, untied</dt>
<dd>The mean cosine of two steps that run the same layer, and of two that do not. Where the first is near 1, recursions could
share their keys and values at little cost.</dd>
<dt>*</dt><dd>A step that makes no keys and values and reads an earlier step's; its rows show those.</dd>
<dt>norm</dt><dd>What leaves the final norm, and goes to the head.</dd>
</dl>
{% if numbers.running | min < 1 %}
<p class="note">Tokens that the router stopped are left out of the steps that they did not run.</p>
{% endif %}
{% endblock %}
"""

EXITS = """\
{% extends "base" %}
{% block title %}{{ about.name }}: exits{% endblock %}
{% block body %}
{% from "parts" import table %}
<h1>{{ about.name }}: what every layer would have said</h1>
<p class="note">{{ about.model }}: {{ about.plan }}; {{ about.dtype }} on {{ about.device }}; {{ numbers.rows }}
row{{ "s" if numbers.rows > 1 }} of {{ numbers.context }} tokens from {{ about.data | join(", ") }}.</p>
<figure><img src="{{ images.layers }}" alt="Agreement, loss, cosine and the oracle's exits by layer">
<figcaption>Each layer as if every token left there, through the final norm, the head and what the exit adds to them.
</figcaption></figure>
<dl>
<dt>agree, right</dt>
<dd>How often a layer's likeliest token is the last layer's, and how often it is the token that follows.</dd>
<dt>loss, sure</dt><dd>The next-token loss in nats, and the mean confidence.</dd>
<dt>cosine, agreed</dt>
<dd>Of a token's state with the last layer's, in front of the final norm; of all tokens, and of those that agree. Where it is
low although the layer already chooses the last layer's token, a copied state is a poor stand-in for what deeper layers
would have made of it.</dd>
<dt>first, settled</dt>
<dd>The layer at which an oracle would leave: the first that agrees with the last one. Settled is the layer from which on
none disagrees.</dd>
</dl>
{{ table(layers) }}

<h2>Confidence by agreement</h2>
<figure><img src="{{ images.confidence }}" alt="Histograms of confidences by agreement, with the fitted Beta densities">
<figcaption>The tokens of this text, run once and not generated. The threshold is where agreement becomes likely enough; a
token whose confidence is above it would leave. <code>fathomlm calibrate</code> learns it from texts that the model makes.
</figcaption></figure>
{{ table(fits) }}

{% if times %}
<h2>Where the time goes</h2>
<figure><img src="{{ images.times }}" alt="Time per token by part, for three ways of decoding">
<figcaption>One text at a time, on this machine: read shares, not milliseconds. State copying asks every layer from the first
exit on; parallel decoding asks the first exit only, and runs the layers behind it later. Both use the plain code that
everything else is held against, not the engine. Hatched parts are what early exits pay for: scores at exits, and keys and
values for skipped layers.</figcaption></figure>
{{ table(times) }}
{% endif %}
{% endblock %}
"""

WEIGHTS = """\
{% extends "base" %}
{% block title %}{{ about.name }}: what tying takes away{% endblock %}
{% block body %}
{% from "parts" import table %}
<h1>{{ about.name }}: what rank do I need?</h1>
<p class="note">{{ about.model }} ({{ about.dtype }}), tied as {{ about.plan }}.</p>
<figure><img src="{{ images.energy }}" alt="Captured energy by rank for each kind of linear">
<figcaption>The residual of a step is the base layer in its place less the tied weight. A LoRA or DoRA that starts from its
SVD captures its largest singular values. A curve that rises early says that a small rank gives most back.</figcaption>
</figure>
{{ table(ranks) }}
<figure><img src="{{ images.ranks }}" alt="The rank that each linear of each step needs">
<figcaption>The rank for nine tenths of a residual's energy, by linear and step. 0 is a step that tying takes nothing from:
it starts as the base layer itself. White lines part the recursions.</figcaption></figure>
{{ table(kinds) }}
<dl>
<dt>energy</dt><dd>The sum of squared singular values.</dd>
<dt>lost norm</dt><dd>The residual's norm against that of the base layer's own weight, as a mean over the steps.</dd>
<dt>rank for</dt><dd>What the step that needs most needs.</dd>
<dt>added</dt><dd>Parameters of such a LoRA on every linear of every shared step. Norms and biases stay tied.</dd>
</dl>
<p class="note">Energy says how much of a matrix comes back, not how much of a model's quality: training moves what is
left.</p>
{% endblock %}
"""

RUNS = """\
{% extends "base" %}
{% block title %}{{ about.name }}: training{% endblock %}
{% block body %}
{% from "parts" import table %}
<h1>{{ about.name }}: training</h1>
<p class="note">{{ about.runs | join(", ") }}</p>
{{ table(summary, "losses in nats per token") }}
{% for name, title in titles.items() %}
<h2>{{ title }}</h2>
<figure><img src="{{ images[name] }}" alt="{{ title }}"></figure>
{% endfor %}
{% endblock %}
"""
