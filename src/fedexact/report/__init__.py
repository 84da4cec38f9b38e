"""What an experiment shows: files, figure, tables."""

from fedexact.report.figure import Curve, convergence_figure, curves, image
from fedexact.report.files import history, result_json, write_report
from fedexact.report.text import (
    closing,
    console,
    data_summary,
    finished_line,
    listing,
    result_table,
)
from fedexact.report.theory import (
    observation_table,
    prediction_notes,
    prediction_table,
    write_theory,
)

__all__ = [
    "Curve",
    "closing",
    "console",
    "convergence_figure",
    "curves",
    "data_summary",
    "finished_line",
    "history",
    "image",
    "listing",
    "observation_table",
    "prediction_notes",
    "prediction_table",
    "result_json",
    "result_table",
    "write_report",
    "write_theory",
]
