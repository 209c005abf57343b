// A decoder as data.
#pragma once

#include <cstddef>
#include <vector>

#include "kernels/table.h"
#include "weights/matrix.h"

namespace outpace {

enum class Score { Softmax, Sigmoid, OfChosen };  // of all experts; of each one alone; the softmax of those that are chosen

// A mixture of experts. Of each part there is one matrix, the rows of all experts one after the other; an expert's are padded
// with zeros to a multiple of 64, so that it is a range of row blocks.
struct Experts {
    int count = 0;             // 0: the layer has none
    int used = 0, inner = 0;   // that a token goes to; inner size of each
    int shared = 0;            // inner size of the expert that every token goes to; 0: there is none
    Score score = Score::Softmax;
    int groups = 1, used_groups = 1;  // the chosen ones are of the best so many of these groups of neighbours,
    bool best_two = false;            // judged by their best two experts, or by the best one
    bool renormalise = false;  // weights of the chosen ones are divided by their sum, or by `least_total` if that is more
    float least_total = 0.0f, scale = 1.0f;
    Matrix router;             // [count, hidden], float32; a row more, where it has one, is the shared expert's gate
    Matrix gate, up, down;
    std::vector<float> router_bias, choice_bias;  // [count]; the second is added to scores for the choice alone
    std::vector<float> gate_bias, up_bias;        // as the rows of these matrices
    std::vector<float> down_bias;                 // [count, hidden]
    std::vector<float> expert_scale;              // [count], of the weights
    // [hidden], all or none: of what the router and the experts read in the place of what the shared expert reads, and of what
    // the experts together and the shared one give.
    std::vector<float> router_norm, norm, post_norm, shared_post_norm;
};

constexpr int kMostTaps = 8;

// A gated delta net, or a state space (Mamba-2), in the place of attention: both keep a state [key_dim][value_dim] a value head.
// A state space may also stand beside attention, in a layer that has q: both read the same input, and what they give is added.
// Value heads share key heads, a range of them one or (tiled) each so-many-th.
struct DeltaNet {
    int key_heads = 0, value_heads = 0, key_dim = 0, value_dim = 0;  // key_heads 0: the layer has none
    int taps = 0;  // of the convolution
    bool tiled = false;
    Matrix qkv, z, b, a;               // queries, keys and values; the output's gate; what updates and decays are made of
    std::vector<float> convolution;    // [taps][channels], the oldest first
    std::vector<float> convolution_bias;  // [channels]
    std::vector<float> decay, dt_bias;  // [value_heads]: decays are e^(decay * softplus(a + dt_bias))
    std::vector<float> norm;           // [value_dim]; of a state space, whose groups are normed behind the gate, [values] or none
    // [value_heads], of a state space: what of a value stands in the output beside the state's. It has no `b`: a token's update
    // is its value times softplus(a + dt_bias), whatever the state is. Of each value head the first values go into `o`, as many
    // as that has inputs for; the others pad it.
    std::vector<float> skip;
    bool scans() const { return !skip.empty(); }
    Matrix o;  // of one beside attention, which has the layer's
    float gate_scale = 1.0f, step_scale = 1.0f;  // of what z and a give
    float output_scale = 1.0f, attended_scale = 1.0f;  // of what o gives, and attention beside it
};

// A short convolution between two gates, in the place of attention.
struct ShortConv {
    int taps = 0;                    // 0: the layer has none
    Matrix in;                       // [3 hidden, hidden]: the gate before it, the one behind it, what goes through
    std::vector<float> convolution;  // [taps][hidden], the oldest first
};

// Attention to latent vectors, which are keys and values of all heads (arXiv 2405.04434). q has of each head its plain part and its
// rotated one; k gives a latent vector and the rotated part of all heads' keys.
struct Latent {
    int rank = 0;                 // of a latent vector; 0: the layer has none
    int plain = 0, rotated = 0;   // sizes of both parts of a head
    bool neighbours = false;      // pairs that turn together stand side by side
    float eps = 0.0f;             // of the norms: q_norm, of what q_down gives, and k_norm, of latent vectors
    Matrix q_down;                // [.., hidden], which q reads; none: q reads the hidden state
    Matrix k_up;                  // [heads * rank, plain]: a head's plain queries as latent vectors
    Matrix v_up;                  // [heads * value, rank]: latent vectors as a head's values
};

// What a layer adds behind its feed-forward: project(activation(gate x) * the token's input for this layer), normed.
struct InputGate {
    Matrix gate, project;     // [width, hidden], [hidden, width]; without them the layer has none
    std::vector<float> norm;  // [hidden]
};

// Tokens' inputs for each layer, beside what enters the first one (Gemma 3n and 4): of token t and its embedding e,
// (scale * table[t] + norm(project e * hidden^-0.5)) / sqrt 2, layer after layer.
struct LayerInputs {
    int width = 0;            // of one layer's; 0: there are none
    Matrix table, project;    // [vocab, layers * width], [layers * width, hidden]
    std::vector<float> norm;  // [width], of each layer's
};

// A convolution over a drafter's block of what enters a part of a layer, and one of what leaves it (DFlash2): a slot sees those
// before it, by kernels of which one part is what `project` makes of the entering states, the same for `group` channels.
struct LocalConv {
    int taps = 0, group = 0, block = 0;  // 0 taps: there is none; slots of a block
    Matrix project;           // [2 * taps * hidden / group, hidden]
    std::vector<float> base;  // [2][taps][hidden]
};

// Vectors that are empty are left out of the computation, as are matrices of a layer that only mixes tokens or only feeds them
// forward.
struct Layer {
    Matrix q, k, v, o;  // without v, values are made of what k gave
    Matrix gate, up, down;  // of a mixture: the shared expert's, where it has one; without `gate`, relu(up) stands in its place
    Experts experts;
    DeltaNet delta;  // with it, there are no q, k, v, unless it has an `o`
    ShortConv conv;  // as with it
    Latent latent;   // with it, there is no v
    LocalConv attn_conv, ffn_conv;  // around attention and around the feed-forward: both or neither
    bool recurs() const { return delta.key_heads > 0 || conv.taps > 0; }
    bool attends() const { return q.data != nullptr; }
    const Matrix& recurrent_output() const { return delta.o.data ? delta.o : o; }
    bool mixes() const { return q.data || recurs(); }
    bool feeds() const { return up.data || experts.count > 0; }
    bool gated = false;  // q has of each head its queries, then what its output is gated by
    std::vector<float> sinks;  // [heads]: of each a logit in the softmax that has no value
    std::vector<float> attn_norm, post_attn_norm, ffn_norm, post_ffn_norm;  // [hidden]
    int kv_heads = 0, head_dim = 0;  // 0: the model's
    int value_dim() const { return latent.rank > 0 ? latent.rank : head_dim; }  // of a KV head's values
    // An earlier layer whose keys and values it reads, having none of its own (of a model beside another: a layer of that); -1: it has.
    int shares = -1;
    std::vector<float> q_norm, k_norm;  // [head_dim], of each head, or [heads * head_dim], over all of them at once
    std::vector<float> v_norm;  // [head_dim]
    std::vector<float> q_bias, k_bias, v_bias, o_bias;
    // [hidden], in the first layer of a learned drafter: q, k and v read the embedding under this norm, then the batch's
    // features under attn_norm, 2 hidden in all; the features alone (normed, with norm_first) are what it adds to.
    std::vector<float> embed_norm;
    bool norm_first = false;
    // [hidden, 2 hidden], of a layer that only drafts: what enters it is made of both, the features under features_norm.
    Matrix join;
    std::vector<float> features_norm;
    int window = 0;  // positions a token sees, itself among them; 0: all
    // Of a drafter's block, in a layer with a window: slots see none behind them, or all see so many before the block.
    bool causal = false, anchored = false;
    int rope = 0;  // which table; -1: heads are not rotated
    float output_scale = 1.0f;  // of the hidden state that it leaves
    float fed_scale = 1.0f;  // of what its feed-forward gives
    InputGate input;
};

struct Config {
    int vocab, hidden, heads, kv_heads, head_dim, ffn;
    float eps, attention_scale, embedding_scale;
    Activation activation;
    int max_length;
    int outputs;  // rows of the head: the vocabulary, or what a drafter knows of it
    float score_cap = 0.0f, logit_cap = 0.0f;  // that scores and logits are kept within, softly; 0: they are not
    float residual_scale = 1.0f;  // of what attention and feed-forward layers add to the hidden state
    bool beside = false;  // it has no keys and values: all of its layers read those of another model
};

struct RopeTable {
    std::vector<float> frequencies;  // inverse ones
    float scale;  // of cosines and sines
    float growth = 0.0f;  // queries are multiplied by 1 + growth * ln(1 + position / period), the ratio rounded down
    int period = 0;
};

// Never changed once it is made, so that any number of models can share it.
struct Weights {
    // Throws std::invalid_argument for what does not fit together.
    Weights(Config config, std::vector<Layer> layers, Matrix embedding, Matrix head, std::vector<float> final_norm,
        std::vector<RopeTable> ropes, LayerInputs inputs = {});

    const Config config;
    const std::vector<Layer> layers;
    const Matrix embedding, head;
    const std::vector<float> final_norm;
    const std::vector<RopeTable> ropes;
    const LayerInputs inputs;

    size_t bytes() const;
};

}  // namespace outpace
