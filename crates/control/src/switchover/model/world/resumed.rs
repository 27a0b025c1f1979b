//! A later towline, which has the records and a look at the QEMUs.

use super::super::super::End;
use super::{Case, Decision, Destination, Finish, Placed, RunRequest, Source, SourceKind, World};
use crate::switchover::DestinationKind;

impl World {
    /// What is durable of this towline.
    pub(super) fn record(&self, index: usize) -> Option<Decision> {
        self.towlines[index]?.record
    }

    /// The last that is recorded anywhere.
    pub(super) fn decided(&self) -> Option<Decision> {
        self.towlines.iter().flatten().filter_map(|towline| towline.record).max()
    }

    /// Whether no towline works on it any more.
    pub(super) fn is_left(&self, index: usize) -> bool {
        self.towlines[index].is_some_and(|towline| !towline.alive || towline.outcome.is_some())
    }

    /// What a towline on the host of this one knows.
    pub(super) fn case(&self, index: usize) -> Case {
        let towline = self.towlines[index].expect("it is there");
        let case = Case::new(towline.record.expect("there is one"), self.is_to_run());
        let source = (towline.request.source == SourceKind::Qemu).then(|| self.source_view());
        let is_driven = towline.request.destination == DestinationKind::Qemu;
        let destination = is_driven.then(|| self.destination_view());
        Case { source, destination, ..case.with_fault(towline.fault) }
    }

    /// What both know together.
    pub(super) fn case_of_both(&self) -> Case {
        let case = Case::new(self.decided().expect("there is one"), self.is_to_run());
        Case { source: Some(self.source_view()), destination: Some(self.destination_view()), ..case }
    }

    fn is_to_run(&self) -> bool {
        match self.towlines[0].expect("there is one").request.run {
            RunRequest::AsItWas => self.carried.is_live(),
            RunRequest::Run => true,
            RunRequest::Pause => false,
        }
    }

    pub(super) fn resume(&mut self, index: usize, case: Case) {
        let finish = case.finish();
        self.resumed |= !matches!(finish, Finish::Wait(_) | Finish::Ask(_));
        match finish {
            Finish::RunDestination => {
                self.towline(index).record = Some(Decision::Run);
                self.destination = Destination::Running;
            }
            Finish::AtDestination(placed) => {
                let is_there = match placed {
                    Placed::Running => self.destination == Destination::Running,
                    _ => self.destination == Destination::Loaded,
                };
                assert!(is_there, "it is not where it is said to be");
                self.forget(index, case);
            }
            Finish::AtSource => {
                assert!(
                    matches!(self.source, Source::HasGuest | Source::RunAgain),
                    "its source does not have it"
                );
                self.forget(index, case);
            }
            Finish::Gone => self.forget(index, case),
            Finish::RunSource | Finish::Quit(End::Source | End::Destination) => {
                unreachable!("nobody chose that")
            }
            Finish::Wait(_) | Finish::Ask(_) => {}
        }
    }

    /// The move is finished as far as this towline sees it; with both ends, for both.
    fn forget(&mut self, index: usize, case: Case) {
        let both = case.source.is_some() && case.destination.is_some();
        for (at, towline) in self.towlines.iter_mut().enumerate() {
            if let Some(towline) = towline
                && (both || at == index)
            {
                towline.record = None;
            }
        }
    }
}
