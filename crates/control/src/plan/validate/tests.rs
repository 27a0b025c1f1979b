use super::super::request::{PostcopyStart, RequestedPages, Task, TransferOptions};
use super::*;

fn postcopy() -> CopyRequest {
    let start = PostcopyStart::Copy { run: None };
    let transfer = TransferOptions::default();
    CopyRequest::new(Task::Postcopy { transfer, start, requested_pages: RequestedPages::MainChannel })
}

fn qmp() -> Destination {
    Destination::Qmp("b.qmp".into())
}

#[test]
fn pairs_without_a_transfer_are_refused() {
    let (image, running) = (Source::Image("a.img".into()), Source::Qmp("a.qmp".into()));
    let (file, tcp) = (Destination::Image("b.img".into()), Destination::Stream("tcp:b:1".parse().unwrap()));
    let exec = Destination::Stream("exec:cat".parse().unwrap());
    let no_guest =
        "--postcopy is for a destination that runs the guest: qmp:, tcp: or unix: with a QEMU behind it";
    let no_qemus = "--postcopy of a running guest is between two qmp: QEMUs, which do it themselves; an image goes to tcp: and unix: too";
    for (source, destination, request, text) in [
        (
            &image,
            &Destination::Null,
            CopyRequest::default(),
            "null: takes a stream; to check an image, `inspect --verify` it",
        ),
        (&image, &file, postcopy(), no_guest),
        (&image, &exec, postcopy(), no_guest),
        (&image, &Destination::Null, postcopy(), no_guest),
        (&running, &tcp, postcopy(), no_qemus),
        (&running, &file, postcopy(), no_qemus),
    ] {
        assert_eq!(validate(source, destination, &request).unwrap_err().to_string(), text);
    }
    for (source, destination) in [(&image, &qmp()), (&image, &tcp), (&running, &qmp())] {
        assert!(validate(source, destination, &postcopy()).is_ok());
    }
    assert!(validate(&running, &Destination::Null, &CopyRequest::default()).is_ok());
}

#[test]
fn copy_of_a_resumed_source_stays_paused() {
    let task = |run| Task::Copy { transfer: TransferOptions::default(), run, resume: true, base: None };
    let source = Source::Qmp("a.qmp".into());
    let (request, lanes) = validate(&source, &qmp(), &CopyRequest::new(task(None))).unwrap();
    assert_eq!((request.run(), lanes), (Some(false), LANES_DEFAULT));
    let error = validate(&source, &qmp(), &CopyRequest::new(task(Some(true)))).unwrap_err();
    assert_eq!(error.to_string(), "--resume with --run: the same guest would run twice");
}

#[test]
fn move_to_a_destination_that_keeps_nothing_is_refused() {
    let (transfer, devices) = (TransferOptions::default(), Vec::new());
    let task = Task::Move { transfer, run: None, detach_vsock: true, devices };
    let request = CopyRequest::new(task);
    let source = Source::Qmp("a.qmp".into());
    for (destination, text) in [
        (Destination::Null, "null: keeps nothing, so its source is not ended: copy to it"),
        (
            Destination::Image("a.img".into()),
            "--detach-vsock needs a qmp: destination, where the device is attached again",
        ),
    ] {
        assert_eq!(validate(&source, &destination, &request).unwrap_err().to_string(), text);
    }
}
