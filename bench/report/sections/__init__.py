"""What stands between the markers of the pages: one function a marker."""

from bench.report.sections import data_path, growth, machine, replay, short, small, targets

# name in the marker -> function of `Results` that writes Markdown
SECTIONS = {
    "machine": machine.section,
    "headline": replay.headline_section,
    "phases": replay.phases_section,
    "cells": replay.cells_section,
    "contenders": replay.contenders_section,
    "targets": targets.section,
    "missed": targets.missed_section,
    "growth": growth.section,
    "rows": data_path.rows_section,
    "attention": data_path.attention_section,
    "steps": small.steps_section,
    "limits": small.limits_section,
    "short": short.section,
}
