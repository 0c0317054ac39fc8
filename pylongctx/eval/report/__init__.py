"""Reports: the records of a folder as tables in the papers' layout and as plots."""

from pylongctx.eval.report.page import write_report

__all__ = ["write_report"]
