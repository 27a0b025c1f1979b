//! Memory that has other content than zeros before the guest is sent into it.

use std::os::unix::fs::FileExt;
use std::sync::Mutex;

use tempfile::TempDir;
use towline_channel::Cancel;
use towline_control::plan::{CopyRequest, Destination, Observer, Source, copy};
use towline_image::Image;
use towline_memload::BLOCK_NAME;
use towline_qmp::commands::HumanMonitorCommand;

use crate::common::{Binary, binaries};
use crate::support::{MEMORY_MIB, MIB, Silent, waiting, with_memory};

/// A guest every other page of which is zero, as an image.
struct Striped {
    directory: TempDir,
    image: Image,
    /// Memory of the guest.
    memory: Vec<u8>,
}

impl Striped {
    fn new(binary: &Binary) -> Self {
        let directory = tempfile::tempdir().unwrap();
        let mut memory = vec![0; (MEMORY_MIB * MIB) as usize];
        for (page, bytes) in memory.chunks_exact_mut(4096).enumerate().skip(1).step_by(2) {
            bytes.fill(1 + (page % 255) as u8);
        }
        let (path, ram) = (directory.path().join("guest.img"), directory.path().join("source"));
        std::fs::write(&ram, &memory).unwrap();
        let backend = format!("memory-backend-file,share=on,mem-path={}", ram.display());
        let (process, qemu) = with_memory(binary, BLOCK_NAME, &backend, &[]);
        drop(qemu);
        let source = Source::Qmp(process.path("qmp"));
        let (to, cancel) = (Destination::Image(path.clone()), Cancel::new().unwrap());
        copy(&source, &to, &CopyRequest::default(), &cancel, &Silent).unwrap();
        Self { directory, image: Image::open(&path).unwrap(), memory }
    }

    fn pages_offset(&self) -> u64 {
        let mut blocks = self.image.ram_blocks().iter();
        blocks.find(|block| block.name == BLOCK_NAME).unwrap().mapped.unwrap().pages_offset
    }

    /// Restores it into a QEMU with this memory. Returns the notices, and whether QEMU has loaded the file
    /// itself.
    fn restore(&self, binary: &Binary, backend: &str, stream: bool) -> (Vec<String>, bool) {
        let (process, qemu) = waiting(binary, BLOCK_NAME, backend);
        drop(qemu);
        let (source, to) =
            (Source::Image(self.image.path().to_owned()), Destination::Qmp(process.path("qmp")));
        let (request, cancel) = (CopyRequest { stream, ..CopyRequest::default() }, Cancel::new().unwrap());
        let notices = Notices::default();
        let report = copy(&source, &to, &request, &cancel, &notices).unwrap();
        let found = self.directory.path().join("found");
        let command_line = format!("pmemsave 0 {} \"{}\"", self.memory.len(), found.display());
        process.client().execute(&HumanMonitorCommand { command_line }).unwrap();
        let found = std::fs::read(found).unwrap();
        // Below it is memory of firmware and screen.
        let differs = |page: &usize| found[page * 4096..][..4096] != self.memory[page * 4096..][..4096];
        let wrong: Vec<usize> = (256..found.len() / 4096).filter(differs).collect();
        assert!(wrong.is_empty(), "{backend}: {} wrong pages, first {}", wrong.len(), wrong[0]);
        (notices.0.into_inner().unwrap(), report.loaded_by_qemu)
    }
}

#[derive(Default)]
struct Notices(Mutex<Vec<String>>);

impl Observer for Notices {
    fn notice(&self, text: &str) {
        self.0.lock().unwrap().push(text.to_owned());
    }
}

/// QEMU leaves the zero pages of an image, and those of lanes, as it finds them.
#[test]
fn memory_with_other_content_gets_zero_pages_as_well() {
    let all = binaries("memory_with_other_content_gets_zero_pages_as_well");
    std::thread::scope(|scope| {
        all.iter().for_each(|binary| drop(scope.spawn(|| check_zero_pages(binary))));
    });
}

fn check_zero_pages(binary: &Binary) {
    let striped = Striped::new(binary);
    let is_old = binary.expected_major == Some(7);
    let directory = striped.directory.path().display();
    let used = striped.directory.path().join("used");
    let restore = |backend: &str, stream| striped.restore(binary, backend, stream);
    let assert_told = |(notices, loaded): (Vec<String>, bool)| {
        let expected = format!("memory backend {BLOCK_NAME:?} of QEMU may have old content");
        assert!(!loaded && notices.iter().any(|text| text.starts_with(&expected)), "{notices:?}");
    };
    for stream in [false, true] {
        std::fs::write(&used, vec![0x5a; striped.memory.len()]).unwrap();
        assert_told(restore(&format!("mem-path={},share=on", used.display()), stream));
        std::fs::write(&used, vec![0x5a; striped.memory.len()]).unwrap();
        assert_told(restore(&format!("mem-path={},share=off", used.display()), stream));
        // Zeros, and known to be.
        std::fs::remove_file(&used).unwrap();
        for backend in [format!("mem-path={directory}"), format!("mem-path={},share=on", used.display())] {
            let (notices, loaded) = restore(&backend, stream);
            assert_eq!(notices, [""; 0], "{backend}");
            assert_eq!(loaded, !is_old && !stream, "{backend}");
        }
    }
    if is_old {
        return;
    }
    let (path, offset) = (striped.image.path().display(), striped.pages_offset());
    let mapped = |offset: u64| format!("mem-path={path},offset={offset},share=off,readonly=on,rom=off");
    for stream in [false, true] {
        assert_told(restore(&mapped(offset - 4096), stream));
    }
    // As stock QEMU leaves an image of a running guest.
    let file = std::fs::File::options().write(true).open(striped.image.path()).unwrap();
    file.write_all_at(&[7; 4096], offset + 8 * MIB).unwrap();
    for stream in [false, true] {
        assert_told(restore(&mapped(offset), stream));
    }
}
