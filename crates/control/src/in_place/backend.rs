//! Memory backends of a QEMU, as it describes them over QMP.
//!
//! A RAM block of a `memory-backend-*` object has the object's id as its name, or with old machine types the
//! object's path (`x-use-canonical-path-for-ramblock-id`). QEMU 8.2 and later also report the address of each
//! block.

use std::collections::BTreeMap;

use serde_json::Value;
use towline_qmp::commands::{HumanMonitorCommand, QomGet, QueryMemdev};
use towline_qmp::{self as qmp, Client, CommandReply, CommandRequest};

/// The only type of backend that maps a given file.
const FILE_BACKEND: &str = "memory-backend-file";
/// Container of the objects that `-object` creates.
const OBJECTS: &str = "/objects/";
/// Names of the columns of `info ramblock` that are read.
const PAGE_SIZE_COLUMN: &str = "PSize";
const ADDRESS_COLUMN: &str = "HVA";

/// A `memory-backend-*` object. A property is absent where this QEMU, or this type, does not have it.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(super) struct BackendObject {
    /// Id of the object.
    pub(super) id: String,
    /// Type of the object, for example `memory-backend-file`.
    pub(super) kind: String,
    /// Size in bytes.
    pub(super) bytes: u64,
    /// True if its pages were allocated at start.
    pub(super) prealloc: bool,
    /// True if it is mapped shared.
    pub(super) share: bool,
    /// Name of the file on the command line.
    pub(super) path: Option<String>,
    /// Offset of the first byte in the file; since 8.1.
    pub(super) offset: Option<u64>,
    /// True if the file was opened for reading only.
    pub(super) readonly: bool,
    /// `on`: the guest cannot write; `auto`: as `readonly`; since 8.2.
    pub(super) rom: Option<String>,
    /// True if the file's content is discarded when QEMU exits.
    pub(super) discard_data: bool,
}

/// A property of a backend, by its QOM name.
#[derive(Debug, Clone, Copy)]
enum BackendProperty {
    Type,
    Share,
    MemPath,
    Offset,
    Readonly,
    Rom,
    DiscardData,
}

const PROPERTIES: [BackendProperty; 7] = [
    BackendProperty::Type,
    BackendProperty::Share,
    BackendProperty::MemPath,
    BackendProperty::Offset,
    BackendProperty::Readonly,
    BackendProperty::Rom,
    BackendProperty::DiscardData,
];

impl BackendProperty {
    const fn name(self) -> &'static str {
        match self {
            Self::Type => "type",
            Self::Share => "share",
            Self::MemPath => "mem-path",
            Self::Offset => "offset",
            Self::Readonly => "readonly",
            Self::Rom => "rom",
            Self::DiscardData => "discard-data",
        }
    }
}

/// All backends of a QEMU with the names of their blocks.
#[derive(Debug, Clone, Default)]
pub(super) struct Backends {
    backends: Vec<BackendObject>,
    /// Address of each block in QEMU; empty before QEMU 8.2.
    addresses: BTreeMap<String, u64>,
}

impl BackendObject {
    /// Returns true if it maps a given file.
    pub(super) fn maps_file(&self) -> bool {
        self.kind == FILE_BACKEND
    }

    /// Sets one of [`PROPERTIES`]; null where QEMU does not have it.
    fn set(&mut self, property: BackendProperty, value: &Value) {
        let text = value.as_str().map(str::to_owned);
        let is_on = value.as_bool().unwrap_or_default();
        match property {
            BackendProperty::Type => self.kind = text.unwrap_or_default(),
            BackendProperty::Share => self.share = is_on,
            BackendProperty::MemPath => self.path = text,
            BackendProperty::Offset => self.offset = value.as_u64(),
            BackendProperty::Readonly => self.readonly = is_on,
            BackendProperty::Rom => self.rom = text,
            BackendProperty::DiscardData => self.discard_data = is_on,
        }
    }
}

impl Backends {
    /// Queries them with two round trips.
    pub(super) fn of(client: &mut Client) -> Result<Self, qmp::Error> {
        let mut backends = Vec::new();
        let mut requests =
            vec![CommandRequest::new(&HumanMonitorCommand { command_line: "info ramblock".into() })?];
        for memdev in client.execute(&QueryMemdev)? {
            let Some(id) = memdev.id else { continue };
            for property in PROPERTIES {
                let path = format!("{OBJECTS}{id}");
                requests.push(CommandRequest::new(&QomGet { path, property: property.name().into() })?);
            }
            let (bytes, prealloc) = (memdev.size, memdev.prealloc);
            backends.push(BackendObject { id, bytes, prealloc, ..BackendObject::default() });
        }
        if backends.is_empty() {
            return Ok(Self::default());
        }
        let mut replies = client.execute_all(&requests)?.into_iter();
        let text = replies.next().expect("one reply for each request").of::<HumanMonitorCommand>()?;
        let mut values = replies.map(property_of);
        for backend in &mut backends {
            for property in PROPERTIES {
                let value = values.next().expect("one reply for each property")?;
                backend.set(property, &value.unwrap_or_default());
            }
        }
        Ok(Self { backends, addresses: addresses(&text) })
    }

    /// The backend of a block.
    pub(super) fn of_block(&self, block: &str) -> Option<&BackendObject> {
        let id = block.strip_prefix(OBJECTS).unwrap_or(block);
        self.backends.iter().find(|backend| backend.id == id)
    }

    /// Address of a block in QEMU, where QEMU reports it.
    pub(super) fn address_of(&self, block: &str) -> Option<u64> {
        self.addresses.get(block).copied()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &BackendObject> {
        self.backends.iter()
    }

    /// Returns true if no other backend has its size, so the size identifies it.
    pub(super) fn has_unique_size(&self, backend: &BackendObject) -> bool {
        self.backends.iter().filter(|other| other.bytes == backend.bytes).count() == 1
    }
}

/// `None` where QEMU does not have the property.
fn property_of(reply: CommandReply) -> Result<Option<Value>, qmp::Error> {
    match reply.of::<QomGet>() {
        Ok(value) => Ok(Some(value)),
        Err(qmp::Error::Refusal { .. }) => Ok(None),
        Err(error) => Err(error),
    }
}

/// The addresses in `info ramblock`, a table whose name column may hold spaces: it is read from the right.
fn addresses(text: &str) -> BTreeMap<String, u64> {
    let mut lines = text.lines();
    let Some((_, columns)) = lines.next().and_then(|heading| heading.split_once(PAGE_SIZE_COLUMN)) else {
        return BTreeMap::new();
    };
    let columns: Vec<&str> = columns.split_whitespace().collect();
    let Some(column) = columns.iter().position(|column| *column == ADDRESS_COLUMN) else {
        return BTreeMap::new();
    };
    lines.filter_map(|line| row(line, columns.len(), column)).collect()
}

/// Name and address of a row with `count` columns after the page size, which has two words.
fn row(line: &str, count: usize, column: usize) -> Option<(String, u64)> {
    let mut rest = line.trim_end();
    let mut words = Vec::with_capacity(count + 2);
    for _ in 0..count + 2 {
        let at = rest.rfind(' ').map_or(0, |space| space + 1);
        words.push(&rest[at..]);
        rest = rest[..at].trim_end();
    }
    let address = words[count - 1 - column].strip_prefix("0x")?;
    let address = u64::from_str_radix(address, 16).ok()?;
    Some((rest.trim().to_owned(), address)).filter(|(name, _)| !name.is_empty())
}

#[cfg(test)]
impl Backends {
    pub(super) fn new<'a>(
        backends: impl IntoIterator<Item = BackendObject>,
        addresses: impl IntoIterator<Item = (&'a str, u64)>,
    ) -> Self {
        let addresses = addresses.into_iter().map(|(name, address)| (name.to_owned(), address));
        Self { backends: backends.into_iter().collect(), addresses: addresses.collect() }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = concat!(
        "              Block Name    PSize              Offset               Used              Total",
        "                HVA  RO\n",
        "                  pc.ram    4 KiB  0x0000000000000000 0x0000000004000000 0x0000000004000000",
        " 0x00007fbbe3e00000  rw\n",
        "              a name 0x1    1 GiB  0x0000000000200000 0x0000000000020000 0x0000000000200000",
        " 0x00007fbbebe00000  ro\n",
        "                            4 KiB  0x0000000000000000 0x0000000000200000 0x0000000000200000",
        " 0x00007fbbebc00000  rw\n",
        "  nonsense\n",
    );

    #[test]
    fn addresses_of_blocks_are_read() {
        let expected = [("a name 0x1".to_owned(), 0x7fbb_ebe0_0000), ("pc.ram".to_owned(), 0x7fbb_e3e0_0000)];
        assert_eq!(addresses(TEXT), BTreeMap::from(expected));
    }

    #[test]
    fn a_qemu_before_8_2_reports_no_addresses() {
        let text = "              Block Name    PSize              Offset               Used              Total\n\
                    pc.ram    2 MiB  0x0000000000200000 0x0000000004000000 0x0000000004000000\n";
        assert_eq!(addresses(text), BTreeMap::new());
        assert_eq!(addresses("unknown command: 'info ramblock'"), BTreeMap::new());
        assert_eq!(addresses(""), BTreeMap::new());
    }

    #[test]
    fn a_block_is_named_by_id_or_path() {
        let backend = |id: &str, bytes| BackendObject { id: id.into(), bytes, ..BackendObject::default() };
        let backends = Backends::new([backend("mem", 8), backend("more", 8), backend("small", 4)], []);
        assert_eq!(backends.of_block("mem"), backends.of_block("/objects/mem"));
        assert!(backends.of_block("mem").is_some());
        assert!(backends.of_block("pc.bios").is_none());
        assert!(!backends.has_unique_size(backends.of_block("mem").unwrap()));
        assert!(backends.has_unique_size(backends.of_block("small").unwrap()));
    }

    proptest::proptest! {
        #[test]
        fn no_text_panics(text in "(.*\n)?( *Block Name *PSize( Used| Total| HVA| é){0,5}\n)?(.*\n){0,3}") {
            let _ = addresses(&text);
        }
    }
}
