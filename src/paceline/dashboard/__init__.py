"""The page that shows runs in a browser: where their time goes, and which worker is late.

run_view        a run's folder becomes one value of JSON, of a bounded size however long the run
metrics_text    the same for Prometheus; grafana.json draws it
access          who may read: a token, and no page of another site
server          HTTP, and server-sent events while a run goes on
page.html       the whole page: style, script, charts
process         `paceline monitor`, and the process that `paceline run --dashboard` starts beside a job

It reads what workers and their main one have written (monitor, tracking, planner), in a process that trains nothing.
"""
