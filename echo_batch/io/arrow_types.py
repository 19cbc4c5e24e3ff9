"""Arrow types that hold others, walked in one place. Knows no columns and no files."""

from collections.abc import Callable

import pyarrow as pa


def with_leaves(kind: pa.DataType, change: Callable[[pa.DataType], pa.DataType]) -> pa.DataType:
    """`kind` with `change` applied to the types inside its lists, structs and maps, or to itself when it is none."""
    if pa.types.is_struct(kind):
        return pa.struct([field.with_type(with_leaves(field.type, change)) for field in kind])
    if pa.types.is_map(kind):
        return pa.map_(with_leaves(kind.key_type, change), with_leaves(kind.item_type, change))
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        item = kind.value_field.with_type(with_leaves(kind.value_type, change))
        if pa.types.is_fixed_size_list(kind):
            return pa.list_(item, kind.list_size)
        return pa.large_list(item) if pa.types.is_large_list(kind) else pa.list_(item)
    return change(kind)
