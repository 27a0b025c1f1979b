//! RAM blocks of the guest, parsed from `info ramblock`.
//!
//! QMP does not report them. The text is a table whose name column may be empty or contain spaces, and whose
//! columns depend on the version: `Offset Used Total` in 7.2, with `HVA RO` after them in 10.0. So rows are
//! parsed from the right, by the columns of the heading.

/// A RAM block of the guest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RamBlockInfo {
    /// Name in the stream, for example `pc.ram`; empty for a block that is not migrated.
    pub name: String,
    /// Page size of the memory that backs it: more than 4096 for huge pages.
    pub page_bytes: u64,
    /// Bytes in use.
    pub used_bytes: u64,
    /// Maximum size in bytes.
    pub max_bytes: u64,
    /// Address in QEMU's process; `None` before QEMU 8.2, which does not report it.
    pub address: Option<u64>,
}

impl RamBlockInfo {
    /// Returns true if the stream carries it. QEMU names a block when it makes it migratable.
    pub fn is_migrated(&self) -> bool {
        !self.name.is_empty()
    }
}

/// Error in the text of `info ramblock`.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RamBlockError {
    /// The heading lacks a column.
    #[error(
        "expected `info ramblock` to begin with a heading of Block Name, PSize, Used and Total, found \"{found}\""
    )]
    Heading { found: String },
    /// A row does not match the heading.
    #[error("expected a row of `info ramblock` under \"{heading}\", found \"{found}\"")]
    Row { heading: String, found: String },
}

/// Positions of the columns, counted from the right.
struct Columns {
    count: usize,
    used: usize,
    total: usize,
    address: Option<usize>,
}

pub(super) fn parse(text: &str) -> Result<Vec<RamBlockInfo>, RamBlockError> {
    let mut lines = text.lines().filter(|line| !line.trim().is_empty());
    let heading = lines.next().unwrap_or_default();
    let columns = columns(heading).ok_or_else(|| RamBlockError::Heading { found: heading.into() })?;
    lines
        .map(|line| {
            row(line, &columns).ok_or_else(|| RamBlockError::Row {
                heading: heading.trim().into(),
                found: line.trim_end().into(),
            })
        })
        .collect()
}

fn columns(heading: &str) -> Option<Columns> {
    let (name, rest) = heading.split_once("PSize")?;
    if name.trim() != "Block Name" {
        return None;
    }
    let names: Vec<&str> = rest.split_whitespace().rev().collect();
    let find = |wanted| names.iter().position(|name| *name == wanted);
    Some(Columns { count: names.len(), used: find("Used")?, total: find("Total")?, address: find("HVA") })
}

fn row(line: &str, columns: &Columns) -> Option<RamBlockInfo> {
    let mut rest = line;
    let mut words = Vec::with_capacity(columns.count);
    for _ in 0..columns.count {
        words.push(pop_word(&mut rest)?);
    }
    let unit = pop_word(&mut rest)?;
    let number = pop_word(&mut rest)?;
    Some(RamBlockInfo {
        name: rest.trim().to_owned(),
        page_bytes: size(number, unit)?,
        used_bytes: hex(words[columns.used])?,
        max_bytes: hex(words[columns.total])?,
        address: columns.address.and_then(|column| hex(words[column])),
    })
}

/// Removes the last word of a line, and returns it.
fn pop_word<'a>(line: &mut &'a str) -> Option<&'a str> {
    let trimmed = line.trim_end();
    let at = trimmed.rfind(' ').map_or(0, |space| space + 1);
    *line = &trimmed[..at];
    Some(&trimmed[at..]).filter(|word| !word.is_empty())
}

fn hex(word: &str) -> Option<u64> {
    u64::from_str_radix(word.strip_prefix("0x")?, 16).ok()
}

fn size(number: &str, unit: &str) -> Option<u64> {
    let shift = ["B", "KiB", "MiB", "GiB", "TiB"].iter().position(|name| *name == unit)? * 10;
    number.parse::<u64>().ok()?.checked_mul(1 << shift)
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT_7_2: &str = concat!(
        "              Block Name    PSize              Offset               Used              Total\n",
        "                  pc.ram    2 MiB  0x0000000000200000 0x0000000004000000 0x0000000004000000\n",
        "                            4 KiB  0x0000000000000000 0x0000000000200000 0x0000000000200000\n",
        "    /rom@etc/acpi/tables    4 KiB  0x0000000005300000 0x0000000000020000 0x0000000000200000\n",
        "0000:00:01.0/virtio-net-pci.rom    4 KiB  0x0000000004280000 0x0000000000040000 0x0000000000040000\n",
    );
    const TEXT_10_0: &str = concat!(
        "              Block Name    PSize              Offset               Used              Total",
        "                HVA  RO\n",
        "              a name 0x1    1 GiB  0x0000000000200000 0x0000000000020000 0x0000000000200000",
        " 0x00007fbbebe00000  rw\n",
    );

    fn block(name: &str, page_bytes: u64, used_bytes: u64, max_bytes: u64) -> RamBlockInfo {
        RamBlockInfo { name: name.into(), page_bytes, used_bytes, max_bytes, address: None }
    }

    #[test]
    fn parses_the_columns_of_7_2() {
        let expected = vec![
            block("pc.ram", 2 << 20, 64 << 20, 64 << 20),
            block("", 4096, 2 << 20, 2 << 20),
            block("/rom@etc/acpi/tables", 4096, 0x20000, 0x200000),
            block("0000:00:01.0/virtio-net-pci.rom", 4096, 0x40000, 0x40000),
        ];
        assert_eq!(parse(TEXT_7_2), Ok(expected));
    }

    #[test]
    fn parses_the_columns_of_10_0_and_names_with_spaces() {
        let address = Some(0x7fbb_ebe0_0000);
        let expected = RamBlockInfo { address, ..block("a name 0x1", 1 << 30, 0x20000, 0x200000) };
        assert_eq!(parse(TEXT_10_0), Ok(vec![expected]));
    }

    #[test]
    fn errors_quote_the_invalid_line() {
        let found = "unknown command: 'info ramblock'".to_owned();
        assert_eq!(parse(&found), Err(RamBlockError::Heading { found }));
        let heading = TEXT_7_2.lines().next().unwrap();
        let error = parse(&format!("{heading}\npc.ram 4 KiB 0x0 lots 0x1\n")).unwrap_err();
        let found = "pc.ram 4 KiB 0x0 lots 0x1".to_owned();
        assert_eq!(error, RamBlockError::Row { heading: heading.trim().into(), found });
    }

    proptest::proptest! {
        #[test]
        fn parser_never_panics(text in "(.*\n)?( *Block Name *PSize( Used| Total| HVA| é){0,5}\n)?(.*\n){0,3}") {
            let _ = parse(&text);
        }
    }
}
