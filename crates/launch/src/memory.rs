//! RAM that is not copied: blocks of a guest's memory that a QEMU maps from a file.
//!
//! ```text
//!   image   [ … |  pc.ram, at offset, length bytes  | … ]
//!                     └──► -object memory-backend-file,id=pc.ram,… -machine memory-backend=pc.ram
//! ```
//! A block's name on the wire is its backend's id, for any kind of backend. Properties: QEMU's
//! `qapi/qom.json`, `MemoryBackendFileProperties`; `offset` from 8.1, `rom` from 8.2.

use std::fmt;
use std::path::PathBuf;

use crate::command_line::{
    CommandLine, OptionName, OptionValue, ParseError, Properties, Property, QemuOption,
};
use crate::policy::AllowedCommandLine;

/// Alignment of a mapping's offset.
const PAGE_BYTES: u64 = 4096;
/// Properties of a former backend that its replacement keeps.
const RETAINED_PROPERTIES: [&str; 5] =
    ["host-nodes", "policy", "dump", "merge", "x-use-canonical-path-for-ramblock-id"];

/// A block of memory in a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MappedBlock {
    /// The block's name: its backend's id, or that of the machine's own memory (`pc.ram`).
    pub id: String,
    /// The file.
    pub path: PathBuf,
    /// Offset in the file in bytes.
    pub offset: u64,
    /// Length in bytes.
    pub length: u64,
}

/// Use of the file by the QEMU that maps it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Sharing {
    /// The file is read and never written; pages that the guest writes are private.
    CopyOnWrite,
    /// The guest writes to the file, which must be its own (a reflink). Devices of other processes
    /// (vhost-user) can map it too.
    Shared,
}

/// Version of a QEMU.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct QemuVersion {
    /// Major version.
    pub major: u32,
    /// Minor version.
    pub minor: u32,
}

/// All mapped blocks of a guest, and the use of their files.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MappedMemory {
    /// The blocks.
    pub blocks: Vec<MappedBlock>,
    /// Use of their files.
    pub sharing: Sharing,
}

/// Memory that cannot be mapped.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum MemoryFileError {
    /// QEMU lacks a property of the backend.
    #[error(
        "memory cannot be mapped by QEMU {found}: expected {expected} or newer for {property}=; {remedy}"
    )]
    Version {
        found: QemuVersion,
        /// The first version that has the property.
        expected: QemuVersion,
        property: &'static str,
        remedy: &'static str,
    },
    /// An offset that is not a multiple of the page size.
    #[error(
        "block {id} is at offset {offset}, expected a multiple of {PAGE_BYTES}; copy the image to a new one"
    )]
    Unaligned {
        id: String,
        /// Offset of the block in the file.
        offset: u64,
    },
    /// An id or a path that QEMU cannot parse.
    #[error(
        "block {id:?} cannot be a backend: expected a letter, then letters, digits, '-', '_' or '.'; rename it"
    )]
    Id { id: String },
    /// A path that is not UTF-8, or has control characters.
    #[error("file {path:?} of block {id} cannot be named in an option: {reason}; rename it")]
    Path { id: String, path: PathBuf, reason: String },
    /// Two blocks with the same id.
    #[error("block {id} is given twice; expected each block once")]
    Repeated { id: String },
    /// The guest has no backend of this id, and its main memory is another.
    #[error(
        "block {id} has no backend in the guest's command line: expected one of {expected}; use the guest's own command line"
    )]
    NoBackend { id: String, expected: String },
    /// The block and the guest's memory differ in size.
    #[error(
        "block {id} has {found} bytes, the guest's command line {expected}; use the image's own command line"
    )]
    Length {
        id: String,
        /// Length found in bytes.
        found: u64,
        /// Length according to the command line.
        expected: u64,
    },
    /// The command line's own memory is malformed.
    #[error("{0}")]
    CommandLine(#[from] ParseError),
}

impl fmt::Display for QemuVersion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

impl MappedMemory {
    /// Maps the guest's memory from these blocks: replaces the backends of their ids, or the machine's own
    /// memory.
    ///
    /// # Errors
    /// A QEMU that is too old, a block that does not fit, or a command line without its backend.
    pub fn apply(&self, guest: &mut AllowedCommandLine, version: QemuVersion) -> Result<(), MemoryFileError> {
        let mut changed = guest.command_line.clone();
        for (index, block) in self.blocks.iter().enumerate() {
            self.check(block, version)?;
            if self.blocks[..index].iter().any(|other| other.id == block.id) {
                return Err(MemoryFileError::Repeated { id: block.id.clone() });
            }
            if changed.object(&block.id).is_some() {
                self.replace_backend(block, &mut changed)?;
            } else {
                self.replace_main_memory(block, &mut changed)?;
            }
        }
        // Both are for memory that has no backend, and touching all pages would copy them.
        changed.options_mut().retain(|option| !["mem-path", "mem-prealloc"].contains(&option.name.as_str()));
        guest.command_line = changed;
        Ok(())
    }

    fn check(&self, block: &MappedBlock, version: QemuVersion) -> Result<(), MemoryFileError> {
        let needs = |major, minor, property, remedy| {
            let expected = QemuVersion { major, minor };
            if version >= expected {
                return Ok(());
            }
            Err(MemoryFileError::Version { found: version, expected, property, remedy })
        };
        match self.sharing {
            Sharing::CopyOnWrite => needs(8, 2, "rom", "use a newer QEMU")?,
            Sharing::Shared if block.offset != 0 => {
                needs(8, 1, "offset", "use a newer QEMU, or a file that begins with the block")?;
            }
            Sharing::Shared => {}
        }
        if !block.offset.is_multiple_of(PAGE_BYTES) {
            return Err(MemoryFileError::Unaligned { id: block.id.clone(), offset: block.offset });
        }
        let is_id = block.id.starts_with(|c: char| c.is_ascii_alphabetic())
            && block.id.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte));
        if is_id { Ok(()) } else { Err(MemoryFileError::Id { id: block.id.clone() }) }
    }

    /// Replaces the object of the block's id by a mapping. Its properties for nodes and dumps are kept.
    fn replace_backend(&self, block: &MappedBlock, changed: &mut CommandLine) -> Result<(), MemoryFileError> {
        let is_it = |option: &&mut QemuOption| {
            option.name.as_str() == "object" && option.id().as_deref() == Some(&block.id)
        };
        let Some(option) = changed.options_mut().iter_mut().find(is_it) else { return Ok(()) };
        let former = option.properties().cloned().unwrap_or(Properties::KeyValue(Vec::new()));
        let expected = former.value("size").map(|size| crate::command_line::parse_size(&size, 1));
        let fault = |source| ParseError::Value { option: "-object".into(), source };
        if let Some(expected) = expected.transpose().map_err(fault)? {
            check_length(block, expected)?;
        }
        *option = self.backend(block, &former)?;
        Ok(())
    }

    /// Adds a backend with the block's id to a machine whose memory had none.
    fn replace_main_memory(
        &self,
        block: &MappedBlock,
        changed: &mut CommandLine,
    ) -> Result<(), MemoryFileError> {
        let others = changed.memory_backends();
        if !others.is_empty() {
            return Err(MemoryFileError::NoBackend { id: block.id.clone(), expected: others.join(", ") });
        }
        if let Some(size) = changed.memory_size()? {
            check_length(block, size.size_bytes)?;
        }
        changed.push(self.backend(block, &Properties::KeyValue(Vec::new()))?)?;
        let machine = changed.options_mut().iter_mut().rfind(|option| option.name.as_str() == "machine");
        if let Some(properties) = machine.and_then(QemuOption::properties_mut) {
            properties.set("memory-backend", &block.id);
        } else {
            let text = format!("memory-backend={}", block.id);
            changed.push(QemuOption::parse(option_name("machine"), Some(&text))?)?;
        }
        Ok(())
    }

    fn backend(&self, block: &MappedBlock, former: &Properties) -> Result<QemuOption, MemoryFileError> {
        let path_error =
            |reason: String| MemoryFileError::Path { id: block.id.clone(), path: block.path.clone(), reason };
        let path = block.path.to_str().ok_or_else(|| path_error("it is not UTF-8".into()))?;
        let mut properties = Vec::new();
        let mut add = |key: &str, value: &str| {
            properties.push(Property { key: key.to_owned(), value: Some(value.to_owned()) });
        };
        add("qom-type", "memory-backend-file");
        add("id", &block.id);
        add("size", &block.length.to_string());
        add("mem-path", path);
        if block.offset != 0 || self.sharing == Sharing::CopyOnWrite {
            add("offset", &block.offset.to_string());
        }
        match self.sharing {
            Sharing::CopyOnWrite => {
                add("share", "off");
                add("readonly", "on");
                add("rom", "off");
            }
            Sharing::Shared => add("share", "on"),
        }
        for (key, value) in former.pairs() {
            if RETAINED_PROPERTIES.contains(&key) {
                add(key, &value);
            }
        }
        let value = OptionValue::Properties(Properties::KeyValue(properties));
        let option = QemuOption { name: option_name("object"), value };
        // A command line for another program must parse here too.
        let text = option.value_text();
        QemuOption::parse(option.name, text.as_deref()).map_err(|error| path_error(error.to_string()))
    }
}

fn option_name(name: &str) -> OptionName {
    OptionName::find(name).expect("QEMU has options -machine and -object")
}

fn check_length(block: &MappedBlock, expected: u64) -> Result<(), MemoryFileError> {
    if block.length == expected {
        return Ok(());
    }
    Err(MemoryFileError::Length { id: block.id.clone(), found: block.length, expected })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::host::HostArguments;

    const NEW: QemuVersion = QemuVersion { major: 10, minor: 0 };

    fn block(id: &str, offset: u64, length: u64) -> MappedBlock {
        MappedBlock { id: id.into(), path: "/srv/a,b.img".into(), offset, length }
    }

    fn apply(
        words: &str,
        sharing: Sharing,
        version: QemuVersion,
        blocks: &[MappedBlock],
    ) -> Result<String, MemoryFileError> {
        let guest = CommandLine::parse(words.split(' ')).unwrap();
        let mut guest = guest.trust(&HostArguments::default()).unwrap();
        MappedMemory { blocks: blocks.to_vec(), sharing }.apply(&mut guest, version)?;
        let words: Vec<_> =
            guest.to_arguments().into_iter().map(|word| word.into_string().unwrap()).collect();
        Ok(words.join(" "))
    }

    #[test]
    fn main_memory_becomes_a_private_mapping() {
        let words = "-machine q35 -m 512 -mem-prealloc -display none";
        let result = apply(words, Sharing::CopyOnWrite, NEW, &[block("pc.ram", 1 << 20, 512 << 20)]).unwrap();
        assert_eq!(
            result,
            "-machine q35,memory-backend=pc.ram -m 512 -display none -object memory-backend-file,id=pc.ram,size=536870912,\
             mem-path=/srv/a,,b.img,offset=1048576,share=off,readonly=on,rom=off"
        );
    }

    #[test]
    fn existing_backends_are_replaced_where_they_are() {
        let words = "-object memory-backend-memfd,id=m0,size=256M,share=on,prealloc=on,host-nodes=0-1,policy=bind \
                     -object memory-backend-ram,id=m1,size=256M -machine q35 -numa node,memdev=m0 -numa node,memdev=m1";
        let blocks = [block("m1", 256 << 20, 256 << 20), block("m0", 0, 256 << 20)];
        let result = apply(words, Sharing::Shared, NEW, &blocks).unwrap();
        assert_eq!(
            result,
            "-object memory-backend-file,id=m0,size=268435456,mem-path=/srv/a,,b.img,share=on,host-nodes=0-1,\
             policy=bind -object memory-backend-file,id=m1,size=268435456,mem-path=/srv/a,,b.img,offset=268435456,share=on \
             -machine q35 -numa node,memdev=m0 -numa node,memdev=m1 -display none"
        );
    }

    #[test]
    fn nodes_of_a_backend_in_json_are_kept() {
        let words = r#"-object {"qom-type":"memory-backend-memfd","id":"m0","size":134217728,"host-nodes":[0,2],"policy":"bind","dump":false}"#;
        let result = apply(words, Sharing::Shared, NEW, &[block("m0", 0, 128 << 20)]).unwrap();
        let wanted =
            "mem-path=/srv/a,,b.img,share=on,dump=off,host-nodes=0,host-nodes=2,policy=bind -display none";
        assert!(result.ends_with(wanted), "{result}");
        let used = format!("{words} -machine q35,memory-backend=m0");
        CommandLine::parse(used.split(' '))
            .unwrap()
            .record()
            .unwrap()
            .allow(&HostArguments::default())
            .unwrap();
    }

    #[test]
    fn old_versions_are_refused_by_the_property_that_they_lack() {
        let old = QemuVersion { major: 7, minor: 2 };
        let error = |sharing, version, offset| {
            let blocks = [block("pc.ram", offset, 128 << 20)];
            apply("-m 128", sharing, version, &blocks).map_err(|error| error.to_string())
        };
        assert_eq!(
            error(Sharing::CopyOnWrite, old, 0).unwrap_err(),
            "memory cannot be mapped by QEMU 7.2: expected 8.2 or newer for rom=; use a newer QEMU"
        );
        assert_eq!(
            error(Sharing::Shared, old, 4096).unwrap_err(),
            "memory cannot be mapped by QEMU 7.2: expected 8.1 or newer for offset=; use a newer QEMU, or a file that begins with \
             the block"
        );
        assert!(!error(Sharing::Shared, old, 0).unwrap().contains("offset"));
        assert!(error(Sharing::CopyOnWrite, QemuVersion { major: 8, minor: 2 }, 0).is_ok());
    }

    #[test]
    fn blocks_that_do_not_fit_are_refused() {
        let error = |words: &str, blocks: &[MappedBlock]| {
            apply(words, Sharing::CopyOnWrite, NEW, blocks).unwrap_err()
        };
        let fits = block("pc.ram", 0, 128 << 20);
        assert_eq!(
            error("-m 256", std::slice::from_ref(&fits)),
            MemoryFileError::Length { id: "pc.ram".into(), found: 128 << 20, expected: 256 << 20 }
        );
        assert_eq!(
            error("-object memory-backend-ram,id=pc.ram,size=64M", std::slice::from_ref(&fits)),
            MemoryFileError::Length { id: "pc.ram".into(), found: 128 << 20, expected: 64 << 20 }
        );
        assert_eq!(
            error("-machine q35,memory-backend=mem", std::slice::from_ref(&fits)),
            MemoryFileError::NoBackend { id: "pc.ram".into(), expected: "mem".into() }
        );
        assert_eq!(
            error("-m 128", &[fits.clone(), fits.clone()]),
            MemoryFileError::Repeated { id: "pc.ram".into() }
        );
        assert_eq!(
            error("-m 128", &[block("pc.ram", 1, 128 << 20)]),
            MemoryFileError::Unaligned { id: "pc.ram".into(), offset: 1 }
        );
        assert_eq!(error("-m 128", &[block("a,b", 0, 1)]), MemoryFileError::Id { id: "a,b".into() });
    }
}
