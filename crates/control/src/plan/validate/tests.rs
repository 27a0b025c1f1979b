use super::super::request::{AfterCopy, PostcopyStart, RequestedPages, Task, TransferOptions};
use super::*;

fn postcopy() -> CopyRequest {
    let start = PostcopyStart::Copy { run: None };
    let transfer = TransferOptions::default();
    CopyRequest::new(Task::Postcopy { transfer, start, requested_pages: RequestedPages::MainChannel })
}

fn refused(source: &Source, destination: &Destination, request: &CopyRequest) -> Invalid {
    match validate(source, destination, request) {
        Err(Error::Invalid(reason)) => reason,
        other => panic!("{other:?}"),
    }
}

fn qmp() -> Destination {
    Destination::Qmp("b.qmp".into())
}

#[test]
fn pairs_without_a_transfer_are_refused() {
    let (image, running) = (Source::Image("a.img".into()), Source::Qmp("a.qmp".into()));
    let (file, tcp) = (Destination::Image("b.img".into()), Destination::Stream("tcp:b:1".parse().unwrap()));
    let exec = Destination::Stream("exec:cat".parse().unwrap());
    let no_guest = || Invalid::Postcopy(InvalidPostcopy::WithoutGuest);
    let no_qemus = || Invalid::Postcopy(InvalidPostcopy::OfQemu);
    let null = &Destination::Null;
    for (source, destination, request, reason) in [
        (&image, null, CopyRequest::default(), InvalidEnds::ImageToNull.into()),
        (&image, &file, postcopy(), no_guest()),
        (&image, &exec, postcopy(), no_guest()),
        (&image, null, postcopy(), no_guest()),
        (&running, &tcp, postcopy(), no_qemus()),
        (&running, &file, postcopy(), no_qemus()),
    ] {
        assert_eq!(refused(source, destination, &request), reason);
    }
    for (source, destination) in [(&image, &qmp()), (&image, &tcp), (&running, &qmp())] {
        assert!(validate(source, destination, &postcopy()).is_ok());
    }
    assert!(validate(&running, &Destination::Null, &CopyRequest::default()).is_ok());
}

#[test]
fn copy_of_a_resumed_source_stays_paused() {
    let (transfer, after) = (TransferOptions::default(), AfterCopy::SourceResumed);
    let request = CopyRequest::new(Task::Copy { transfer, after, base: None });
    let source = Source::Qmp("a.qmp".into());
    assert_eq!(validate(&source, &qmp(), &request).unwrap(), LANES_DEFAULT);
    assert_eq!(request.run(), Some(false));
    let address: Address = "tcp:b:1".parse().unwrap();
    let reason = InvalidEnds::ResumedTo { address: address.clone() };
    assert_eq!(refused(&source, &Destination::Stream(address), &request), reason.into());
}

#[test]
fn move_to_a_destination_that_keeps_nothing_is_refused() {
    let (transfer, devices) = (TransferOptions::default(), Vec::new());
    let task = Task::Move { transfer, run: None, detach_vsock: true, devices };
    let request = CopyRequest::new(task);
    let source = Source::Qmp("a.qmp".into());
    for (destination, reason) in [
        (Destination::Null, InvalidEnds::EndedToNull),
        (Destination::Image("a.img".into()), InvalidEnds::DetachedWithoutQemu),
    ] {
        assert_eq!(refused(&source, &destination, &request), reason.into());
    }
}
