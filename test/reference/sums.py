"""Sums of rows that are named by their places."""

import torch


def sum_rows(rows, places, ends):
    """(T, N): sum i is that of rows (R, N) at places[ends[i - 1]:ends[i]], the first from 0 on, in float32, one after
    the other, and rounded once. A place outside of the rows adds nothing, nor does an end outside of the places."""
    total, places, ends = torch.zeros(len(ends), rows.shape[1]), places.tolist(), ends.tolist()
    for i, (begin, end) in enumerate(zip([0, *ends], ends)):
        for place in places[max(begin, 0) : max(end, 0)]:
            if 0 <= place < len(rows):
                total[i] += rows[place].float()
    return total.to(rows.dtype)
