// The words of the dashboard, of statistics and of metrics: the one glossary, which the page shows by
// a hover and docs/statistics.md as tables (`python -m tools.docs.glossary`). Of each word its
// meaning, the names of statistics, and those of metrics without `pipespec_`.

const GLOSSARY = {
  "The pipeline": [
    ["target", "The large model whose text is wanted. It alone decides tokens.", [], []],
    ["draft", "The small model that proposes tokens of the target.", [], []],
    ["head", "The process that has the draft and decides what enters the pipeline: rank 0.", [], []],
    ["stage", "A process that computes a slice of the target's layers.", [], ["rank_place_info"]],
    ["ranks", "Processes of the cluster that are there: the head and the stages.", [], ["ranks"]],
    ["steps", "A step is a batch on its way: the head sends it, every stage computes it, and its verdict comes.", ["steps"], ["steps_total"]],
    ["row", "One token that a stage computes in a step; its batch is all rows of that step.", [], ["rows_total"]],
    ["row budget", "The most rows that a step takes, not counting those of prompts.", [], ["row_budget"]],
    ["verdict", "What the last stage decides in a step: for each request, the tokens that follow.", [], []],
    ["epoch", "A time in which the ranks stay the same; a new one begins after a fault, and when a host joins or leaves.", [], ["epoch"]],
    ["plain pipeline", "Decoding without draft tokens, as it would be here: one row of a request at a time, a token a pass.", [], []],
    ["busy", "The share of the time with requests in which a stage computed.", ["stage_busy"], ["stage_busy_share"]],
    ["waits", "The share of the time with requests in which a stage waited for the batch of the rank before.", [], ["stage_receive_seconds_total", "stage_active_seconds_total"]],
  ],
  "Draft tokens": [
    ["tree of draft tokens", "What the draft proposes for a request: several continuations of the text, which begin alike.", [], []],
    ["draft tokens", "Tokens that the draft proposed and the stages compute before they are decided.", [], ["draft_rows_total"]],
    ["draft rounds", "How often the draft expanded trees.", ["draft_rounds_per_step"], ["spec_decode_num_drafts_total"]],
    ["decided", "Tokens that were decided without having been proposed; their rows come from the text itself.", [], ["rows_total"]],
    ["prompts", "Tokens of prompts, which are computed before the first token is decided.", [], ["rows_total"]],
    ["root", "The last accepted token, from which the tree grows.", [], []],
    ["in flight", "The token is somewhere in the pipeline.", [], []],
    ["not scheduled", "The token was proposed, and has no row in the pipeline yet.", [], []],
    ["accepted", "Draft tokens that a verdict has: they are text now.", [], ["draft_hits_total"]],
    ["pruned", "A verdict has another token in its place, so it is dropped.", ["pruned_rows"], []],
    ["depth", "How many tokens a draft token is after the last decided one.", [], []],
    ["acceptance rate", "Of the draft tokens of a depth that were computed, the share that was accepted.", [], ["draft_hits_total", "draft_rows_total"]],
    ["hit rate", "Of the tokens of an answer, the share that was an accepted draft token.", ["hit_rate"], []],
  ],
  "Speed": [
    ["now", "What the cluster holds now; tokens, steps, draft rounds and preemptions are counted since it started.", [], []],
    ["tokens", "Tokens generated for all clients since the cluster started.", [], ["decided_tokens_total"]],
    ["tokens per second", "Tokens after the first, per second; on the dashboard those of all requests together, over four seconds.", ["tokens_per_s"], []],
    ["tokens per step", "Tokens after the first, per step after that of the first; 1 for a plain pipeline with one request. On the dashboard all tokens over all steps since the cluster started, in its chart those of four seconds.", ["tokens_per_step"], []],
    ["to the first token", "From the request to its first token (time to first token, TTFT).", ["ttft_ms"], ["time_to_first_token_seconds"]],
    ["between tokens", "Time between tokens after the first (time between tokens, TBT): mean, median, 99th percentile.", ["tbt_ms"], ["inter_token_latency_seconds"]],
    ["median", "Half of all measured times are shorter than this; 90 % and 99 % of them are shorter than what the next columns say.", [], []],
    ["step time", "How long a step lasted.", ["step_ms"], []],
    ["rows per step", "Rows scheduled per step.", ["rows_per_step"], []],
    ["control time", "What the controller costs a rank in a step.", ["control_ms_per_step"], []],
    ["features", "How long the head waits in a step for the target's hidden states, which a draft head reads.", ["features_ms_per_step"], []],
    ["stage times", "Of each stage: milliseconds by the rows of a batch (`points`), what each KV slot that it reads adds, and how many a batch reads; averages of the latest batches.", ["stage_times"], []],
    ["round times", "Milliseconds of a draft round by the nodes that it expanded.", ["round_times"], []],
    ["overlap", "Whether the draft worked while the stages computed (`proposer.overlap`).", ["overlap"], []],
    ["attention", "The attention backend of each stage.", ["attention"], ["rank_info"]],
  ],
  "Requests and memory": [
    ["decoding", "Requests that are being decoded.", [], ["num_requests_running"]],
    ["waiting", "Requests that wait for a place among those.", [], ["num_requests_waiting"]],
    ["preemptions", "Requests that were set aside for want of KV slots, and resumed later with the same text.", [], ["num_preemptions_total"]],
    ["KV slots", "Places for the keys and values (KV) of one token each, in every stage.", [], ["kv_slots"]],
    ["KV slots held", "Slots that running requests use.", [], ["kv_slots_held"]],
    ["KV slots cached", "Slots with the text of finished requests, for prompts that begin alike; they count as free.", [], ["kv_slots_retained"]],
    ["KV in use", "Held slots over all slots. Near 100 % draft tokens are left out, then requests preempted.", [], ["kv_cache_usage_perc"]],
    ["cached tokens", "Tokens of the prompt that were found in KV slots of an earlier request.", ["cached_tokens"], ["prefix_cache_hits_total"]],
    ["prompt", "Tokens of the request.", [], []],
    ["answer", "Tokens of the answer so far.", [], []],
    ["for", "How long this page has seen the request.", [], []],
  ],
  Faults: [
    ["worker ended", "A process of a rank has ended.", [], ["faults_total"]],
    ["worker silent", "A rank made no progress, or its host gave no sign of life.", [], ["faults_total"]],
    ["link broke", "A rank lost its neighbour, or Redis.", [], ["faults_total"]],
    ["step stalled", "All ranks waited, though a request was running.", [], ["faults_total"]],
    ["Redis gone", "Redis ended, hung, or could not be reached.", [], ["faults_total"]],
    ["stayed away", "A lost rank did not come back, and others took its place.", [], ["faults_total"]],
  ],
  Labels: [
    ["emulated", "Stages, draft and links are held to the times of another machine (`emulate`).", ["emulated"], []],
    ["over-runs", "Steps that took longer than the emulated machine's; shown under `emulate` only, 0 otherwise.", ["overruns"], []],
    ["synthetic", "The draft has a stated accuracy instead of being a model.", ["synthetic"], []],
    ["lossy", "The acceptance rule may accept tokens that the target would not choose.", ["lossy"], []],
    ["seed", "The seed, also where it was drawn.", ["seed"], []],
  ],
};

const MEANINGS = new Map(Object.values(GLOSSARY).flatMap((words) => words.map(([word, text]) => [word.toLowerCase(), text])));
const NAMED = "[data-word], dt, th, h2, .entry";

/** Let the words in an element show their meaning by a hover; returns it. */
export function explain(element) {
  for (const each of element.querySelectorAll(NAMED)) {
    const word = each.dataset.word ?? each.textContent.trim().toLowerCase();
    const meaning = MEANINGS.get(word);
    if (!meaning) continue;
    each.title = meaning;
    each.classList.add("explained");
  }
  return element;
}
