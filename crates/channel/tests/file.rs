//! Files: the stream's cursor, and the former content that stays.
#![allow(clippy::unwrap_used)] // Helpers of tests are tests.

mod common;

use common::{cancel, open, recv_exact, recv_to_end, send_all, soon};
use std::fs::OpenOptions;
use std::os::fd::IntoRawFd;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use tempfile::TempDir;
use towline_channel::{Capabilities, Channel, Error, FileChannel, IoBuf, Listener, SendFlags};

fn scratch() -> (TempDir, PathBuf) {
    let directory = TempDir::new().unwrap();
    let path = directory.path().join("image");
    (directory, path)
}

#[test]
fn a_file_is_truncated_at_the_offset() {
    let (_directory, path) = scratch();
    std::fs::write(&path, "headold").unwrap();
    let channel = open(&format!("file:{},offset=0x4", path.display()));
    send_all(&*channel, b"new").unwrap();
    assert_eq!(std::fs::read(&path).unwrap(), b"headnew");
    let listener = Listener::bind(&format!("file:{},offset=4", path.display()).parse().unwrap()).unwrap();
    let reader = listener.accept(soon(), &cancel()).unwrap();
    assert_eq!(recv_to_end(&*reader).unwrap(), b"new");
    assert!(matches!(listener.accept(soon(), &cancel()), Err(Error::Unsupported { .. })));
}

#[test]
fn a_new_file_is_its_owner_s_alone_and_a_missing_one_an_error() {
    let (_directory, path) = scratch();
    let address = format!("file:{}", path.display());
    let missing = Listener::bind(&address.parse().unwrap()).unwrap_err();
    assert!(matches!(&missing, Error::Io { op: "open", peer, .. } if *peer == address), "{missing:?}");
    drop(open(&address));
    assert_eq!(path.metadata().unwrap().permissions().mode() & 0o777, 0o600);
}

#[test]
fn a_file_is_written_and_read_at_one_cursor() {
    let (_directory, path) = scratch();
    let file = OpenOptions::new().read(true).write(true).create_new(true).open(&path).unwrap();
    let channel = FileChannel::new(file, 3, "file:test").unwrap();
    assert!(!channel.capabilities().contains(Capabilities::BIDIRECTIONAL));
    send_all(&channel, b"stream").unwrap();
    assert_eq!(std::fs::read(&path).unwrap(), b"\0\0\0stream");
    assert!(matches!(recv_exact(&channel, 1), Err(Error::Closed { wanted: 1, got: 0, .. })));
}

#[test]
fn a_descriptor_number_starts_at_the_offset_of_its_file() {
    let (_directory, path) = scratch();
    std::fs::write(&path, "abcdef").unwrap();
    let mut file = std::fs::File::open(&path).unwrap();
    std::io::Seek::seek(&mut file, std::io::SeekFrom::Start(2)).unwrap();
    let channel = open(&format!("fd:{}", file.into_raw_fd()));
    assert_eq!(recv_to_end(&*channel).unwrap(), b"cdef");
    assert!(matches!(send_all(&*channel, b"x"), Err(Error::Unsupported { .. })));
}

#[test]
fn an_offset_no_file_has_is_refused() {
    let (_directory, path) = scratch();
    let file = OpenOptions::new().write(true).create_new(true).open(&path).unwrap();
    let channel = FileChannel::new(file, u64::MAX, "file:test").unwrap();
    let error = channel.send(&[IoBuf::from(b"x")], SendFlags::empty()).unwrap_err();
    assert!(matches!(error, Error::Io { op: "send", .. }), "{error:?}");
}
