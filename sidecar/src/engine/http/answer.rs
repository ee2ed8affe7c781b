//! Answers of the generating endpoints, whole and streamed.

use std::collections::VecDeque;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};

use bytes::Bytes;
use hyper::body::{Body, Frame};
use serde_json::{Value, json};
use tokio::sync::mpsc::UnboundedReceiver;

use super::Service;
use super::request::Job;
use crate::engine::sequence::Output;

/// Which of the two OpenAI shapes an answer has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Shape {
    Completion,
    Chat,
}

/// One request's answer while it is made.
#[derive(Debug)]
pub(super) struct Answer {
    pub(super) service: Arc<Service>,
    pub(super) shape: Shape,
    pub(super) id: String,
    pub(super) created: u64,
    prompt_lengths: Vec<usize>,
    /// Cached tokens of each prompt, from its first sample.
    cached_tokens: Vec<usize>,
    samples: usize,
    /// Tokens generated so far, by sequence.
    generated: Vec<usize>,
    unfinished: usize,
}

impl Answer {
    /// Begins the answer to `job`.
    pub(super) fn new(
        service: Arc<Service>,
        shape: Shape,
        id: String,
        created: u64,
        job: &Job,
    ) -> Self {
        let sequences = job.prompts.len() * job.samples;
        Self {
            service,
            shape,
            id,
            created,
            prompt_lengths: job.prompts.iter().map(Vec::len).collect(),
            cached_tokens: vec![0; job.prompts.len()],
            samples: job.samples,
            generated: vec![0; sequences],
            unfinished: sequences,
        }
    }

    /// Collects everything; `None` when the engine stopped first.
    pub(super) async fn whole(mut self, mut outputs: UnboundedReceiver<Output>) -> Option<Value> {
        let mut texts = vec![String::new(); self.generated.len()];
        while self.unfinished > 0 {
            let output = outputs.recv().await?;
            let text = self.take(output);
            texts[output.index as usize].push_str(&text);
        }
        let choices: Vec<Value> = texts
            .iter()
            .enumerate()
            .map(|(index, text)| self.choice(index, text))
            .collect();
        let object = match self.shape {
            Shape::Completion => "text_completion",
            Shape::Chat => "chat.completion",
        };
        Some(json!({
            "id": self.id, "object": object, "created": self.created, "model": self.service.model_name,
            "choices": choices, "service_tier": null, "system_fingerprint": null, "usage": self.usage(),
            "kv_transfer_params": null,
        }))
    }

    /// Counts one token and returns its text.
    fn take(&mut self, output: Output) -> String {
        let index = output.index as usize;
        if index.is_multiple_of(self.samples) {
            self.cached_tokens[index / self.samples] = output.cached_tokens;
        }
        self.generated[index] += 1;
        self.unfinished -= usize::from(output.finished);
        let word = self.service.tokenizer.decode(output.token);
        // A completion continues its prompt, so it begins with the space between two words.
        if self.shape == Shape::Chat && self.generated[index] == 1 {
            word
        } else {
            format!(" {word}")
        }
    }

    fn choice(&self, index: usize, text: &str) -> Value {
        match self.shape {
            Shape::Completion => json!({
                "index": index, "text": text, "logprobs": null, "finish_reason": "length", "stop_reason": null,
                "prompt_logprobs": null,
            }),
            Shape::Chat => json!({
                "index": index,
                "message": {"role": "assistant", "content": text, "refusal": null, "tool_calls": []},
                "logprobs": null, "finish_reason": "length", "stop_reason": null,
            }),
        }
    }

    fn usage(&self) -> Value {
        let prompt_tokens: usize = self.prompt_lengths.iter().sum();
        let completion_tokens: usize = self.generated.iter().sum();
        let cached_tokens: usize = self.cached_tokens.iter().sum();
        json!({
            "prompt_tokens": prompt_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
            "completion_tokens": completion_tokens,
            "prompt_tokens_details": {"cached_tokens": cached_tokens},
        })
    }

    fn chunk(&self, choices: &Value, usage: Option<Value>) -> Bytes {
        let object = match self.shape {
            Shape::Completion => "text_completion",
            Shape::Chat => "chat.completion.chunk",
        };
        let mut chunk = json!({
            "id": self.id, "object": object, "created": self.created, "model": self.service.model_name, "choices": choices,
        });
        if let (Some(usage), Some(chunk)) = (usage, chunk.as_object_mut()) {
            chunk.insert("usage".to_owned(), usage);
        }
        Bytes::from(format!("data: {chunk}\n\n"))
    }

    fn token_choice(&self, output: Output, text: &str) -> Value {
        let finish_reason = output.finished.then_some("length");
        match self.shape {
            Shape::Completion => json!([{
                "index": output.index, "text": text, "logprobs": null, "finish_reason": finish_reason, "stop_reason": null,
            }]),
            Shape::Chat => json!([{
                "index": output.index, "delta": {"content": text}, "logprobs": null, "finish_reason": finish_reason,
            }]),
        }
    }
}

/// A response body: server-sent events as the tokens come, or bytes that are ready.
#[derive(Debug)]
pub(super) enum ResponseBody {
    /// Everything at once.
    Whole(Option<Bytes>),
    /// One event a token.
    Stream(Box<EventStream>),
}

/// Server-sent events of one answer. Dropping it drops the receiver, which aborts the request.
#[derive(Debug)]
pub(super) struct EventStream {
    answer: Answer,
    outputs: UnboundedReceiver<Output>,
    include_usage: bool,
    continuous_usage: bool,
    ready: VecDeque<Bytes>,
    done: bool,
}

impl EventStream {
    /// Begins the stream; a chat opens with the role of each choice.
    pub(super) fn new(answer: Answer, outputs: UnboundedReceiver<Output>, job: &Job) -> Self {
        let mut stream = Self {
            answer,
            outputs,
            include_usage: job.include_usage,
            continuous_usage: job.continuous_usage,
            ready: VecDeque::new(),
            done: false,
        };
        if stream.answer.shape == Shape::Chat {
            stream.open_choices();
        }
        stream
    }

    /// The opening chunks wait for the first token, as in vLLM: their arrival marks the end of the prefill.
    fn open_choices(&mut self) {
        for index in 0..self.answer.generated.len() {
            let choices = json!([{
                "index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": null, "finish_reason": null,
            }]);
            let usage = self.running_usage();
            self.ready.push_back(self.answer.chunk(&choices, usage));
        }
    }

    fn running_usage(&self) -> Option<Value> {
        self.continuous_usage.then(|| self.answer.usage())
    }

    fn push(&mut self, output: Output) {
        let text = self.answer.take(output);
        let choices = self.answer.token_choice(output, &text);
        let usage = self.running_usage();
        self.ready.push_back(self.answer.chunk(&choices, usage));
        if self.answer.unfinished == 0 {
            if self.include_usage {
                let usage = self.answer.usage();
                self.ready
                    .push_back(self.answer.chunk(&json!([]), Some(usage)));
            }
            self.ready
                .push_back(Bytes::from_static(b"data: [DONE]\n\n"));
            self.done = true;
        }
    }

    fn poll_event(
        &mut self,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Bytes, EngineStopped>>> {
        let started = self.answer.generated.iter().any(|tokens| *tokens > 0);
        if started && let Some(event) = self.ready.pop_front() {
            return Poll::Ready(Some(Ok(event)));
        }
        if self.done {
            return Poll::Ready(None);
        }
        match self.outputs.poll_recv(context) {
            Poll::Pending => Poll::Pending,
            Poll::Ready(None) => Poll::Ready(Some(Err(EngineStopped))),
            Poll::Ready(Some(output)) => {
                self.push(output);
                Poll::Ready(self.ready.pop_front().map(Ok))
            }
        }
    }
}

/// The engine stopped before the answer was whole; the connection is cut.
#[derive(Debug)]
pub(super) struct EngineStopped;

impl std::fmt::Display for EngineStopped {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("the engine stopped before the answer was whole")
    }
}

impl std::error::Error for EngineStopped {}

impl Body for ResponseBody {
    type Data = Bytes;
    type Error = EngineStopped;

    fn poll_frame(
        self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, EngineStopped>>> {
        match self.get_mut() {
            Self::Whole(bytes) => Poll::Ready(bytes.take().map(|bytes| Ok(Frame::data(bytes)))),
            Self::Stream(stream) => stream
                .poll_event(context)
                .map(|event| event.map(|bytes| bytes.map(Frame::data))),
        }
    }

    fn is_end_stream(&self) -> bool {
        match self {
            Self::Whole(bytes) => bytes.is_none(),
            Self::Stream(stream) => stream.done && stream.ready.is_empty(),
        }
    }

    fn size_hint(&self) -> hyper::body::SizeHint {
        match self {
            Self::Whole(bytes) => {
                hyper::body::SizeHint::with_exact(bytes.as_ref().map_or(0, Bytes::len) as u64)
            }
            Self::Stream(_) => hyper::body::SizeHint::default(),
        }
    }
}
