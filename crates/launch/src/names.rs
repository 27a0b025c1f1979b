//! Tables of names, grouped by a common value.

/// A value, and the names that have it, separated by blanks.
pub(crate) type NameGroup<T> = (T, &'static str);

/// Returns the value of the first group that has the name, with the table's own text of it. A name of the
/// table that ends with `*` is a prefix.
pub(crate) fn find<T: Copy>(table: &[NameGroup<T>], name: &str) -> Option<(T, &'static str)> {
    table.iter().find_map(|(value, names)| {
        let known = names.split_ascii_whitespace().find(|known| match known.strip_suffix('*') {
            Some(prefix) => name.starts_with(prefix),
            None => *known == name,
        })?;
        Some((*value, known))
    })
}

/// Returns the names of all groups.
#[cfg(test)]
pub(crate) fn all<T>(table: &'static [NameGroup<T>]) -> impl Iterator<Item = &'static str> {
    table.iter().flat_map(|(_, names)| names.split_ascii_whitespace())
}
