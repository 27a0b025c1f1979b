//! `mem:`: a guest without a machine as source, memory that verifies one as destination.

use std::fmt;
use std::sync::{Arc, OnceLock};

use towline_control::plan::{
    CopyRequest, Destination, ProcessDestination, ProcessGuest, ProcessSource, Source,
};
use towline_memload::{CheckOutcome, Checked, MemOptions, Room, Shape, Synthetic};
use towline_migration::{Guest, Result, Sink};

use crate::units::bytes;

/// `mem:` on the command line, and the guest that was received there.
#[derive(Debug, Clone)]
pub(crate) struct MemEndpoint {
    options: MemOptions,
    received: Arc<OnceLock<Arc<Checked>>>,
}

impl MemEndpoint {
    pub(super) fn parse(text: &str) -> Result<Self, String> {
        Ok(Self { options: MemOptions::parse(text, bytes)?, received: Arc::default() })
    }

    pub(super) fn source(&self) -> Result<Source, String> {
        Ok(Source::Process(Arc::new(MemSource(self.options.shape()?))))
    }

    pub(super) fn destination(&self) -> Result<Destination, String> {
        let (room, received) = (self.options.room()?, Arc::clone(&self.received));
        Ok(Destination::Process(Arc::new(MemDestination { room, received })))
    }

    /// The guest that was received, as far as it has arrived.
    pub(crate) fn outcome(&self) -> Option<CheckOutcome> {
        self.received.get().map(|checked| checked.outcome())
    }
}

impl fmt::Display for MemEndpoint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.options.fmt(f)
    }
}

/// Refuses a synthetic guest where nothing can take it.
pub(crate) fn check(source: &Source, destination: &Destination, request: &CopyRequest) -> Result<(), String> {
    let text = match (source, destination) {
        (Source::Process(_), _) if request.is_postcopy() => {
            "--postcopy is for a guest that a QEMU can run, and mem: is not one"
        }
        (Source::Process(_), Destination::Qmp(_)) => {
            "a synthetic guest (mem:) has no devices, so no QEMU can load it: copy it to mem:, an image or a stream"
        }
        (Source::Process(_), Destination::Null) => {
            "null: takes a stream; mem: receives a synthetic guest and verifies it"
        }
        _ => return Ok(()),
    };
    Err(text.into())
}

#[derive(Debug)]
struct MemSource(Shape);

impl ProcessSource for MemSource {
    fn name(&self) -> &'static str {
        "mem"
    }

    fn create(&self) -> Result<Box<dyn ProcessGuest>> {
        Ok(Box::new(MemGuest(Synthetic::new(self.0)?)))
    }
}

struct MemGuest(Synthetic);

impl ProcessGuest for MemGuest {
    fn run(&self, send: &mut dyn FnMut(&dyn Guest)) -> Result<()> {
        self.0.run(|guest| send(guest))
    }
}

#[derive(Debug)]
struct MemDestination {
    room: Room,
    received: Arc<OnceLock<Arc<Checked>>>,
}

impl ProcessDestination for MemDestination {
    fn create(&self) -> Result<Arc<dyn Sink>> {
        let checked = Arc::new(self.room.allocate()?);
        Ok(Arc::clone(self.received.get_or_init(|| checked)) as Arc<dyn Sink>)
    }
}

impl fmt::Display for MemDestination {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("mem:")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::errors;
    use towline_channel::Cancel;
    use towline_control::plan::{self, Observer, PostcopyStart, RequestedPages, Task, TransferOptions};

    struct Silent;

    impl Observer for Silent {}

    #[test]
    fn sizes_have_the_suffixes_of_the_command_line() {
        let error = MemEndpoint::parse("many").unwrap_err();
        let text = "mem:many: unknown suffix \"many\": expected bytes, or K, M, G or T, or KB, MB, GB or TB";
        assert_eq!(error, text);
    }

    #[test]
    fn pairs_without_a_transfer_are_refused() {
        let mem = MemEndpoint::parse("64M").unwrap();
        let (source, image) = (mem.source().unwrap(), Source::Image("a.img".into()));
        let transfer = TransferOptions::default();
        let postcopy = CopyRequest::new(Task::Postcopy {
            transfer,
            start: PostcopyStart::Copy { run: None },
            requested_pages: RequestedPages::MainChannel,
        });
        let moved =
            CopyRequest::new(Task::Move { transfer, run: None, detach_vsock: false, devices: Vec::new() });
        let copied = CopyRequest::default();
        let (qmp, mem) = (Destination::Qmp("b.qmp".into()), mem.destination().unwrap());
        let cancel = Cancel::new().unwrap();
        for (source, destination, request, text) in [
            (&source, &mem, &postcopy, "--postcopy is for a guest that a QEMU can run, and mem: is not one"),
            (
                &source,
                &qmp,
                &copied,
                "a synthetic guest (mem:) has no devices, so no QEMU can load it: copy it to mem:, an image or a stream",
            ),
            (
                &source,
                &Destination::Null,
                &copied,
                "null: takes a stream; mem: receives a synthetic guest and verifies it",
            ),
            (
                &image,
                &mem,
                &postcopy,
                "--postcopy is for a destination that runs the guest: qmp:, tcp: or unix: with a QEMU behind it",
            ),
            (
                &Source::Qmp("a.qmp".into()),
                &mem,
                &moved,
                "mem: is gone with this process, so its source is not ended: copy to it",
            ),
        ] {
            let refused = match check(source, destination, request) {
                Ok(()) => {
                    let failure = plan::copy(source, destination, request, &cancel, &Silent).unwrap_err();
                    errors::worded(&*failure.error)
                }
                Err(error) => error,
            };
            assert_eq!(refused, text);
        }
    }
}
