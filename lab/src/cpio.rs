//! A writer of newc cpio archives, the format of Linux's initramfs.
//!
//! Format: Linux, Documentation/driver-api/early-userspace/buffer-format.rst. Times and owners are zero, so
//! the same content makes the same archive.

/// An archive being written.
#[derive(Default)]
pub struct Archive {
    bytes: Vec<u8>,
    entries: u32,
}

const MAGIC: &str = "070701";
const TRAILER: &str = "TRAILER!!!";
const DIRECTORY: u32 = 0o040_755;
const REGULAR_FILE: u32 = 0o100_000;

impl Archive {
    /// Adds a directory; its parent must have been added before.
    pub fn directory(&mut self, path: &str) {
        self.entry(path, DIRECTORY, &[]);
    }

    /// Adds a file with its permission bits.
    pub fn file(&mut self, path: &str, permissions: u32, content: &[u8]) {
        self.entry(path, REGULAR_FILE | permissions, content);
    }

    /// Returns the archive with its trailer.
    pub fn finish(mut self) -> Vec<u8> {
        self.entry(TRAILER, 0, &[]);
        self.bytes
    }

    fn entry(&mut self, path: &str, mode: u32, content: &[u8]) {
        self.entries += 1;
        let size = u32::try_from(content.len()).expect("files of an initramfs are below 4 GiB");
        let name_size = u32::try_from(path.len() + 1).expect("names are short");
        // ino mode uid gid nlink mtime filesize devmajor devminor rdevmajor rdevminor namesize check
        let fields = [self.entries, mode, 0, 0, 1, 0, size, 0, 0, 0, 0, name_size, 0];
        self.bytes.extend_from_slice(MAGIC.as_bytes());
        for field in fields {
            self.bytes.extend_from_slice(format!("{field:08x}").as_bytes());
        }
        self.bytes.extend_from_slice(path.as_bytes());
        self.bytes.push(0);
        self.pad();
        self.bytes.extend_from_slice(content);
        self.pad();
    }

    fn pad(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_entry_is_header_name_and_content_each_padded_to_four() {
        let mut archive = Archive::default();
        archive.file("ab", 0o644, b"hello");
        let bytes = archive.finish();
        assert_eq!(&bytes[..14], b"07070100000001");
        assert_eq!(&bytes[14..22], b"000081a4");
        assert_eq!(&bytes[54..62], b"00000005");
        assert_eq!(&bytes[94..102], b"00000003");
        // 110 bytes of header and 3 of name, padded to 116.
        assert_eq!(&bytes[110..116], b"ab\0\0\0\0");
        assert_eq!(&bytes[116..121], b"hello");
        assert_eq!(&bytes[124..130], MAGIC.as_bytes());
        assert_eq!(bytes.len() % 4, 0);
    }
}
